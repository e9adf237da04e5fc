"""What a scheme says of itself, and what it makes of a weight. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.onednn import num_bytes
from ridgeline.kernels.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.quantization import SCHEMES


class Weight(Protocol):
    """The matrix of a linear map, in whatever form: something that multiplies. nbytes: the memory it takes."""

    @property
    def nbytes(self) -> int: ...

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x · weightᵀ + bias: [T, O] in the dtype of `x_TI`."""

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        """As the op `norm_linear`: (y, s) with s = x + residual, y the map of rms_norm(s), gated if there is a gate."""


@dataclass(frozen=True)
class PlainWeight:
    """A weight as it was loaded, or the same numbers as the ops' implementations like them best. Differentiable as it
    was loaded."""

    ops: Ops
    weight_OI: Tensor

    @property
    def nbytes(self) -> int:
        return num_bytes(self.weight_OI)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.ops.linear(x_TI, self.weight_OI, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        return self.ops.norm_linear(x_TI, residual_TI, norm_weight_I, eps, self.weight_OI, bias_O, gate)


@dataclass(frozen=True)
class ScaledWeight:
    """weight = level · scale, one scale per output. product: the op that multiplies with such a weight."""

    ops: Ops
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    level_OI: Tensor
    scale_O: Tensor

    @property
    def nbytes(self) -> int:
        return num_bytes(self.level_OI) + self.scale_O.nbytes

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.product(x_TI, self.level_OI, self.scale_O, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        n_TI, s_TI = self.ops.rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        y_TO = self.linear(n_TI, bias_O)
        return (self.ops.gated_activation(y_TO, gate) if gate else y_TO), s_TI


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to hold weights. name: what `LLMConfig.quantization` calls it.

    supports: where it runs. needs: that, in words. prepare: what multiplies in a loaded weight's place; the loaded one
    itself where nothing is faster, otherwise something without gradients that keeps no reference to it.
    weight_bytes: of one weight, scales aside; None: as many as its dtype has.
    """

    name: str
    prepare: Callable[[PlainWeight], Weight]
    supports: Callable[[Platform], bool]
    needs: str
    weight_bytes: int | None = None

    def check(self, platform: Platform) -> None:
        """Raises InvalidConfig where it does not run."""
        if not self.supports(platform):
            here = platform.arch or platform.device_type
            others = [name for name in SCHEMES if name != "plain" and scheme(name).supports(platform)]
            raise InvalidConfig(
                f"quantization {self.name} needs {self.needs}, and the device ({here}) is none; "
                f"{f'use {others[0]}' if others else 'leave it out'}."
            )


SchemeOf = Callable[[str], Scheme]  # a module's dotted name in the decoder → the scheme of its weight


def scheme(name: str | None) -> Scheme:
    """The scheme of that name; None: plain weights. Raises InvalidConfig for names that do not exist."""
    return SCHEMES[name or "plain"]


def everywhere(chosen: Scheme) -> SchemeOf:
    """The same scheme for all modules."""
    return lambda module: chosen
