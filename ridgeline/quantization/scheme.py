"""A quantization scheme, and the forms that it gives to weights.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.onednn import num_bytes
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import Held
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization import SCHEMES


class Weight(Protocol):
    """The matrix of a linear map, in any form that can multiply.

    nbytes: the memory that it takes.
    stored: the tensor that holds its numbers.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def stored(self) -> Tensor: ...

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias: [T, O] in the dtype of `x_TI`."""

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        """Return (y, s) as the op `norm_linear` does, of an operand with a norm. Only a `TakesRounded` takes room."""


@runtime_checkable
class TakesRounded(Protocol):
    """A `Weight` whose activations the op before may round, and which may round its own results for the next."""

    def room(self, tokens: int, dtype: torch.dtype) -> Rounded | None:
        """Return memory for rounded activations, or None if those of so many tokens had better come as they are."""

    def rounds_gated(self, tokens: int, dtype: torch.dtype) -> bool:
        """Return True if `norm_linear` with a gate takes no kernel more where there is room for its results."""

    def rounded_linear(self, x: Rounded, bias_O: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias: [T, O] in the dtype of x."""

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        """Return (y, s), with y in the epilogue's room if it has any."""


def takes_rounded(weight: Weight) -> TypeGuard[TakesRounded]:
    """Return True if a weight is `TakesRounded`. Layers ask in every step, and Python takes 8 µs to look for methods,
    so each class is looked at once."""
    kind = type(weight)
    if kind not in _TAKING:
        _TAKING[kind] = isinstance(weight, TakesRounded)
    return _TAKING[kind]


_TAKING: dict[type[Weight], bool] = {}


@dataclass(frozen=True)
class PlainWeight:
    """A weight as it was loaded, or the same numbers in a layout that the ops prefer. Only a weight as it was loaded is
    differentiable."""

    ops: Ops
    weight_OI: Tensor

    @property
    def nbytes(self) -> int:
        return num_bytes(self.weight_OI)

    @property
    def stored(self) -> Tensor:
        return self.weight_OI

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.ops.linear(x_TI, self.weight_OI, bias_O)

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.ops.norm_linear(x, self.weight_OI, epilogue)


class InThree(ABC):
    """The `norm_linear` of weights that no op multiplies together with a norm: the norm, the linear map, the gate."""

    ops: Ops

    @abstractmethod
    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return the result of `Weight.linear`."""

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        x_TI, residual_TI, norm_weight_I, eps = x
        assert norm_weight_I is not None
        n_TI, s_TI = self.ops.rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        y_TO = self.linear(n_TI, epilogue.bias_O)
        return (self.ops.gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO), s_TI


@dataclass(frozen=True)
class ScaledWeight(InThree):
    """A weight as levels with one scale per output: weight = level · scale.

    product: the op that multiplies with such a weight.
    """

    ops: Ops
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    level_OI: Tensor
    scale_O: Tensor

    @property
    def nbytes(self) -> int:
        return num_bytes(self.level_OI) + self.scale_O.nbytes

    @property
    def stored(self) -> Tensor:
        return self.level_OI

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.product(x_TI, self.level_OI, self.scale_O, bias_O)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to hold weights.

    name: its name in `LLMConfig.quantization`.
    supports: returns True for platforms that it runs on.
    needs: what such a platform has, in words.
    prepare: takes a loaded weight and returns the weight to multiply with. It returns the loaded weight itself if no
        other form is faster. Any other form has no gradients and keeps no reference to the loaded weight.
    weight_bytes: bytes of one weight without its scales; None: as many as its dtype has.
    held: the form of each fused projection in the files, in which it is allocated and kept (None: plain numbers). Such
        weights are not prepared. Empty where weights are loaded as plain numbers.
    """

    name: str
    prepare: Callable[[PlainWeight], Weight]
    supports: Callable[[Platform], bool]
    needs: str
    weight_bytes: int | None = None
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
