"""A quantization scheme: the form that it gives to weights, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import Held
from ridgeline.kernels.ops import Ops
from ridgeline.quantization import SCHEMES
from ridgeline.quantization.weight import Weight


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to hold weights.

    name: its name in `LLMConfig.quantization`.
    supports: returns True for platforms that it runs on.
    needs: what such a platform has, in words.
    prepare: takes the ops and a loaded matrix and returns the weight to multiply with. It stores the loaded matrix
        itself if no other form is faster. Any other form has no gradients and keeps no reference to the matrix.
    weight_bytes: the least bytes of one weight while it is loaded, without its scales; None: as many as its dtype has.
    product_bytes, product_rate: bytes of one weight as products read it, and the name of the `Hardware.matrix` rate at
        which these run; None: those of its dtype.
    held: the form of each fused projection in the files, in which it is allocated and kept (None: plain numbers). Such
        weights are not prepared. Empty where weights are loaded as plain numbers.
    """

    name: str
    prepare: Callable[[Ops, Tensor], Weight]
    supports: Callable[[Platform], bool]
    needs: str
    weight_bytes: int | None = None
    product_bytes: float | None = None
    product_rate: str | None = None
    held: tuple[Held | None, ...] = ()

    def check(self, platform: Platform) -> None:
        """Raise InvalidConfig if the scheme does not run on `platform`."""
        if not self.supports(platform):
            here = platform.arch or platform.device_type
            others = [name for name in SCHEMES if name != "plain" and scheme(name).supports(platform)]
            raise InvalidConfig(
                f"quantization {self.name} needs {self.needs}, and the device ({here}) is none; "
                f"{f'use {others[0]}' if others else 'leave it out'}."
            )


SchemeOf = Callable[[str], Scheme]  # a module's dotted name in the decoder → the scheme of its weight


def scheme(name: str | None) -> Scheme:
    """Return the scheme of that name; None names plain weights. Raises InvalidConfig for an unknown name."""
    return SCHEMES[name or "plain"]


def everywhere(chosen: Scheme) -> SchemeOf:
    """Return a `SchemeOf` that gives all modules the same scheme."""
    return lambda module: chosen
