"""The matrix of a linear map, in any form that can multiply. `layout.py` says which form a platform multiplies fastest.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.onednn import num_bytes
from ridgeline.kernels.gemm.codes import panels
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.panels import Panels
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.plain import rounded
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.op import Epilogue, NormLinear, Operand, in_three
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops

Form = Tensor | Fp8 | Coded | Levels | Panels  # tensors, and a format that says what they mean


class Weight(ABC):
    """The matrix of a linear map. A `FormedWeight` is one matrix. Other weights are made of several, or do something
    else besides; no op multiplies these together with a norm."""

    ops: Ops

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that it takes."""

    @property
    @abstractmethod
    def stored(self) -> Tensor:
        """The tensor that holds its numbers."""

    @abstractmethod
    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias: [T, O] in the dtype of x. Only a weight that gives a buffer takes rounded x."""

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        """Return (y, s) as the op `norm_linear` does, of an operand with a norm, with y in the epilogue's buffer if it
        has any. Here these are three ops: the norm, the linear map, the gate."""
        x_TI, residual_TI, norm_weight_I, eps = x
        assert norm_weight_I is not None
        n_TI, s_TI = self.ops.rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        y_TO = self.linear(n_TI, epilogue.bias_O)
        return (self.ops.gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO), s_TI

    @property
    def adapts(self) -> bool:
        """True if adapters change products of the step under way, so that the matrix alone does not say what they
        are."""
        return False

    @property
    def takes_rounded(self) -> bool:
        """True if it may give a buffer. Layers ask this first, in every step: the length of a tensor takes 1 µs."""
        return False

    def buffer(self, tokens: int, dtype: torch.dtype) -> Rounded | None:
        """Return memory for activations that the preceding op rounds, or None if those of so many tokens had better
        come as they are."""
        return None

    def rounds_gated(self, tokens: int, dtype: torch.dtype) -> bool:
        """Return True if `norm_linear` with a gate needs no further kernel to round its results into a buffer."""
        return False


@dataclass(frozen=True)
class WrappedWeight(Weight):
    """A weight in any form, with whose products something else is done. It holds the numbers of `inner`."""

    ops: Ops
    inner: Weight

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def stored(self) -> Tensor:
        return self.inner.stored


class Product(NamedTuple):
    """The functions that multiply with one form of weights, alone (FP8 also takes rounded x) and behind a norm."""

    linear: Callable[[Any, Any, Tensor | None], Tensor]
    norm_linear: NormLinear[Any]


@dataclass(frozen=True)
class FormedWeight(Weight):
    """One matrix.

    form: its tensors. A plain tensor is the matrix as it was loaded, or the same numbers in a layout that the ops
        prefer. Only a matrix as it was loaded is differentiable.
    product: the functions of `ops` that multiply with this form.
    """

    ops: Ops
    form: Form
    product: Product
    takes_rounded: bool = False

    @property
    def nbytes(self) -> int:
        return num_bytes(self.form) if isinstance(self.form, Tensor) else self.form.nbytes

    @property
    def stored(self) -> Tensor:
        return self.form if isinstance(self.form, Tensor) else self.form.stored

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        return self.product.linear(x_TI, self.form, bias_O)

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.product.norm_linear(x, self.form, epilogue)

    def buffer(self, tokens: int, dtype: torch.dtype) -> Rounded | None:
        form = self.form
        if not isinstance(form, Fp8) or self.ops.chosen["fp8_linear"] != "triton" or torch.is_grad_enabled():
            return None
        from ridgeline.kernels.gemm.fp8.triton import takes_rounded  # Triton, which is imported only where it runs

        if not takes_rounded(form, tokens, dtype):
            return None
        return rounded.buffer(tokens, form.weight_OI.shape[1], dtype, form.weight_OI.device)

    def rounds_gated(self, tokens: int, dtype: torch.dtype) -> bool:
        if not isinstance(self.form, Fp8) or self.ops.chosen["fp8_norm_linear"] != "triton":
            return False
        from ridgeline.kernels.gemm.fp8.triton import rounds_gated  # likewise

        return rounds_gated(self.form, tokens, dtype)


def tensors_in(value: object, but: tuple[type, ...] = ()) -> Iterator[Tensor]:
    """Yield the tensors of a form of weights, whatever it is made of. but: kinds of parts that are left out."""
    if isinstance(value, but):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each, but)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), but)


def weight_of(ops: Ops, form: Form) -> FormedWeight:
    """Return the weight that multiplies with a form."""
    return FormedWeight(ops, form, product_of(ops, form), isinstance(form, Fp8))


def product_of(ops: Ops, form: Form) -> Product:
    """Return the functions that multiply with a form."""
    match form:
        case Tensor():
            return Product(ops.linear, ops.norm_linear)
        case Fp8():
            return Product(ops.fp8_linear, ops.fp8_norm_linear)
        case Coded():
            return Product(ops.coded_linear, ops.coded_norm_linear)
        case Panels():
            return Product(panels.linear, panels.norm_linear)
    linear = ops.w8a8_linear if form.format.rounds else ops.int8_linear
    return Product(linear, in_three(ops.rms_norm, linear, ops.gated_activation))
