"""Ops and their implementations. An op is a contract, which its implementations keep.

Each op has a folder. `op.py` holds the signature and the plain reference, `cases.py` the cases that tests and
benchmarks share, and `cost.py` the least work. The other files are implementations, named by what they run on. The
implementation is chosen once, from the platform, when the model is built.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast, overload

import torch

from ridgeline.kernels.base.case import Cases, Cuts
from ridgeline.kernels.base.errors import InvalidConfig

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound=Callable[..., Any])
Overrides = Mapping[str, str]  # op → the implementation wanted


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform that ops will run on.

    arch: "sm_90", "gfx942", … on a GPU, "" on a CPU.
    """

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
    """Return True: implementations in plain torch run on every platform."""
    return True


def nowhere(platform: Platform) -> bool:
    """Return False: such an implementation runs where it is asked for by name."""
    return False


def on_cpu(platform: Platform) -> bool:
    """Return True on a CPU. It is for functions that torch has for CPUs alone."""
    return platform.device_type == "cpu"


def has_byte_products(platform: Platform) -> bool:
    """Return True on a CPU that the package's C++ is written for: one with AVX2."""
    return on_cpu(platform) and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def on_gpu(platform: Platform) -> bool:
    """Return True for GPUs that Triton supports: NVIDIA's from Ampere on, and AMD's. (On a CPU its interpreter runs the
    kernels if they are asked for by name.)"""
    return platform.device_type == "cuda" and not platform.arch.startswith(("sm_5", "sm_6", "sm_7"))


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `target` is "module:function", which is imported only if it is chosen. The function takes
    the arguments of the op's reference, with the same names and in the same order. It may take more arguments with
    defaults."""

    name: str
    target: str
    supports: Callable[[Platform], bool] = anywhere

    def load(self) -> Callable[..., Any]:
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


REFERENCE = "reference"


@dataclass(frozen=True)
class Op(Generic[F]):
    """An op with its implementations in order of preference. The reference is the last choice, and the oracle of the
    tests.

    The reference's signature is the op's type. As an attribute of `Ops` an op stands for the chosen function, so every
    call is checked against that signature.

    matrix: the rate of the matrix units limits the op too, and not memory alone.
    of: the op whose implementation it follows where no other is asked for by its own name.
    """

    name: str
    reference: F
    implementations: tuple[Implementation, ...] = ()
    matrix: bool = False
    of: str = ""

    def fused(self, name: str, reference: G) -> Op[G]:
        """Return an op that adds something to this one, with an implementation of its own, of that name, beside each of
        this op's. Who chooses this op's implementation chooses that one too."""
        beside = (replace(each, target=f"{each.target.partition(':')[0]}:{name}") for each in self.implementations)
        return Op(name, reference, tuple(beside), self.matrix, self.name)

    def choose(self, platform: Platform, wanted: str | None = None) -> F:
        """Return the function of the implementation that `chosen` names."""
        name = self.chosen(platform, wanted)
        if name == REFERENCE:
            return self.reference
        return cast("F", next(i for i in self.implementations if i.name == name).load())

    def chosen(self, platform: Platform, wanted: str | None = None) -> str:
        """Return the name of the first implementation that supports `platform`, or `wanted`, whatever platforms that
        supports.

        Raises InvalidConfig if there is no implementation called `wanted`.
        """
        if wanted is None:
            return next((i.name for i in self.implementations if i.supports(platform)), REFERENCE)
        known = [REFERENCE, *(i.name for i in self.implementations)]
        if wanted not in known:
            raise InvalidConfig(f"op {self.name} has no implementation {wanted!r}; known: {', '.join(known)}.")
        return wanted

    def cases(self) -> Cases:
        """Return the op's cases, which `OP_CASES` in the `cases.py` beside its reference holds, or none.

        Only tests and benchmarks call this: an engine never imports cases.
        """
        found: Mapping[str, Cases] = self._beside("cases", "OP_CASES")
        return found.get(self.name, Cases())

    def cuts(self) -> Cuts | None:
        """Return the cuts of the op's kernels, which `OP_CUTS` in a `cuts.py` beside its reference holds, if any."""
        found: Mapping[str, Cuts] = self._beside("cuts", "OP_CUTS")
        return found.get(self.name)

    def _beside(self, file: str, name: str) -> Mapping[str, Any]:
        """Return a table of a module in the folder of the reference, {} if there is none."""
        module = f"{self.reference.__module__.rpartition('.')[0]}.{file}"
        return getattr(importlib.import_module(module), name, {}) if importlib.util.find_spec(module) else {}

    @overload
    def __get__(self, instance: None, owner: type) -> Op[F]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> F: ...
    def __get__(self, instance: object, owner: type) -> Op[F] | F:
        """Return the op itself, or the function that an instance of `Ops` has chosen, which is imported now. The
        instance then holds it, and does not come here again."""
        if instance is None:
            return self
        return cast("F", getattr(instance, "load")(self))  # noqa: B009 (of `Ops`, which is above this module)
