"""An op is a contract; its implementations compete to keep it.

Each op has a folder: `op.py` holds the signature, the plain reference and the cases that tests and benchmarks share;
every other file is one implementation. Which one runs is chosen once, when the model is built, from the platform.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Where ops will run. arch: "sm_90", "gfx942", … on a GPU, "" on a CPU."""

    device_type: str
    arch: str = ""

    @staticmethod
    def of(device: torch.device) -> Platform:
        if device.type != "cuda":
            return Platform(device_type=device.type)
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return Platform(device_type="cuda", arch=properties.gcnArchName.split(":")[0])
        return Platform(device_type="cuda", arch=f"sm_{properties.major}{properties.minor}")


def anywhere(platform: Platform) -> bool:
    """For implementations in plain torch."""
    return True


def by_name_only(platform: Platform) -> bool:
    """For implementations that change results by more than rounding: nobody gets them unasked."""
    return False


def on_gpu(platform: Platform) -> bool:
    """For Triton: NVIDIA from Ampere on, and AMD. (On a CPU its interpreter runs them when asked for by name.)"""
    return platform.device_type == "cuda" and not platform.arch.startswith(("sm_5", "sm_6", "sm_7"))


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: `target` is "module:function", imported only when chosen.

    prepare: "module:function" that makes of a loaded weight the form this implementation reads fastest; the op takes
    either. "": weights are best as they are.
    """

    name: str
    target: str
    supports: Callable[[Platform], bool] = anywhere
    prepare: str = ""

    def load(self) -> Callable[..., Any]:
        return _attribute(self.target)


@dataclass(frozen=True)
class Op:
    """`implementations` are in order of preference; the reference is the last resort and the oracle."""

    name: str
    reference: Callable[..., Any]
    implementations: tuple[Implementation, ...] = ()

    def choose(self, platform: Platform, wanted: str | None = None) -> Callable[..., Any]:
        """The first implementation that supports `platform`, or the one named `wanted`, wherever that may run."""
        chosen = self._chosen(platform, wanted)
        return chosen.load() if chosen is not None else self.reference

    def preparation(self, platform: Platform, wanted: str | None = None) -> str:
        """How the implementation that `choose` chooses wants its weights prepared; "": not at all."""
        chosen = self._chosen(platform, wanted)
        return chosen.prepare if chosen is not None else ""

    def _chosen(self, platform: Platform, wanted: str | None) -> Implementation | None:
        """None: the reference."""
        if wanted == "reference":
            return None
        for implementation in self.implementations:
            if wanted == implementation.name or (wanted is None and implementation.supports(platform)):
                return implementation
        if wanted is not None:
            known = ", ".join(["reference", *(i.name for i in self.implementations)])
            raise InvalidConfig(f"op {self.name} has no implementation {wanted!r}; known: {known}.")
        return None


def load_op(target: str) -> Op:
    """The `Op` at "module:ATTRIBUTE"."""
    return _attribute(target)


def preparation(target: str) -> Callable[[Tensor], Any]:
    """The function at "module:function", or for "" one that leaves weights as they are."""
    return _attribute(target) if target else lambda weight: weight


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


Overrides = Mapping[str, str]
