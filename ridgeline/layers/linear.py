"""Linear layers, in which several projections of one input may be fused.

Legend:
    T  tokens of the step
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.layers.build import Build
from ridgeline.layers.norm import Norm, summed_norm
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.token_parts import TokenParts
from ridgeline.quantization.clipped import Clips
from ridgeline.quantization.held import Filling, empty, joined, settled
from ridgeline.quantization.multiplied import MultipliedWeight, Multipliers, factors
from ridgeline.quantization.weight import FormedWeight, Weight, WrappedWeight, weight_of


class Linear(nn.Module):
    """A linear map, or several of them fused.

    parts: the rows of each fused projection, in order. The weight is [sum(parts), inputs].
    columns: what the parts consist of, if they are several things that ranks divide one by one. They are as many
        outputs together.
    tied: the parameter of another module, to be used as the weight if that is plain numbers.
    over: the ranks that divide the inputs between them, so that their outputs are added up.
    pending: the ranks over which the input of `normed` is still to be added up.
    multipliers: the numbers that multiply the outputs, and how many of these each has. `prepare` multiplies the weight
        by them, if that is plain numbers.
    clips: the bounds of inputs and outputs, if the build has such.
    weight: the parameter that is loaded and trained. It is None once another form has taken its place.
    fillings: the tensors that are loaded instead, if the scheme keeps the form of the files.
    matrix: the form that multiplies.
    below: the weight stays in the host's memory, and other code places it on the device (`streamed.py`).
    """

    weight: nn.Parameter | None
    fillings: Sequence[Filling]
    matrix: Weight

    def __init__(
        self,
        inputs: int,
        parts: tuple[int, ...],
        bias: bool,
        build: Build,
        *,
        tied: nn.Parameter | None = None,
        over: Axis = ALONE,
        pending: Axis = ALONE,
        multipliers: Multipliers = (),
        columns: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.parts, self.over, self.pending, self.multipliers = parts, over, pending, multipliers
        self.columns = columns or parts
        self.ops = build.ops
        self.scheme, self.dtype, self.below = build.scheme, build.dtype, build.below
        held, self.inputs = self.scheme.held, inputs
        rows = parts if len(held) == len(parts) else (sum(parts),)  # of one tensor that holds all parts
        self.fillings = empty(held, rows, inputs, build.dtype, build.loading_device)
        self.weight = weight = None
        if not held:
            own = tied is None
            self.weight = weight = build.parameter(sum(parts), inputs, on_host=build.below) if own else tied
        self.bias = build.parameter(sum(parts)) if bias else None
        self._factor_O = factors(multipliers, build.device)
        self.clips = Clips(parts, build.parameter(4 * len(parts))) if build.clipped else None
        self.multiply_with(joined(build.ops, self.fillings) if weight is None else weight_of(build.ops, weight))

    def columns_of(self, part: int) -> tuple[int, ...]:
        """Return the columns of which one of the parts consists."""
        ends = list(accumulate(self.columns, initial=0))
        start = sum(self.parts[:part])
        return self.columns[ends.index(start) : ends.index(start + self.parts[part])]

    def prepare(self) -> None:
        """Hold the loaded weight in the form of its scheme. If that is another form, the parameter is let go (a tied
        one stays with its other owner), and the layer can then neither be trained nor exported."""
        if self.over.rank > 0:
            self.bias = None  # added up, it must count once
        if self.fillings:
            inner = self.matrix.inner if isinstance(self.matrix, WrappedWeight) else self.matrix
            self.multiply_with(settled(inner, self.dtype), loaded=True)
            self.fillings = ()
        if self.weight is None:
            return
        if self._factor_O is not None:
            with torch.no_grad():
                self.weight.mul_(self._factor_O[:, None])
                if self.bias is not None:
                    self.bias.mul_(self._factor_O)
            self._factor_O = None
        if self.below and self.scheme.name == "plain":  # others place it on the device
            return
        self.multiply_with(self.scheme.prepare(self.ops, self.weight), loaded=True)
        if self.matrix.stored is not self.weight:
            self.weight = None

    @property
    def keeps_weight(self) -> bool:
        """True if `prepare` leaves all loaded numbers as they are."""
        plain = not self.fillings and self.scheme.name == "plain" and not self.below
        return plain and self._factor_O is None and self.clips is None

    @property
    def only_matrix(self) -> nn.Parameter | None:
        """The weight W, if `forward` returns x · Wᵀ and does nothing else."""
        alone = self.keeps_weight and self.bias is None and self.over.size == 1
        same = not isinstance(self.matrix, WrappedWeight) and self.matrix.stored is self.weight
        return self.weight if alone and same else None

    def multiply_with(self, matrix: Weight, *, loaded: bool = False) -> None:
        """Let this form of the weight multiply. It is the checkpoint's, without multipliers. loaded: its numbers are
        there."""
        if self.clips is not None:
            self.matrix = self.clips.around(matrix, loaded=loaded)
        else:
            self.matrix = matrix if self._factor_O is None else MultipliedWeight(self.ops, matrix, self._factor_O)

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weight if it is not a parameter, otherwise 0."""
        return self.matrix.nbytes if self.weight is None else 0

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """Return [T, O] in the dtype of x [T, I]."""
        y_TO = self.matrix.linear(x, self.bias)
        return y_TO if self.over.size == 1 else self.over.all_reduce(y_TO)

    def buffer(self, tokens: int) -> Rounded | None:
        """Return memory for this layer's input if the preceding op should quantize it, else None."""
        return self.matrix.buffer(tokens, self.dtype) if self.matrix.takes_rounded else None

    def normed(
        self, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None, gate: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (this layer applied to norm(s), s) with s = x + residual, or s = x if there is no residual yet. With
        an RMS norm this is one op.

        norm: None applies the layer to s itself.
        gate: the activation of a gated pair: the result is act(first half of the outputs) * second half.
        """
        if self.pending.size > 1:
            return self._summed(norm, x_TI, residual_TI, gate)
        if norm is not None and norm.bias is None:
            return self.matrix.norm_linear(Operand(x_TI, residual_TI, norm.weight, norm.eps), Epilogue(self.bias, gate))
        n_TI, s_TI = self.normed_input(norm, x_TI, residual_TI)
        return self._gated(n_TI, gate), s_TI

    def normed_input(self, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(s), s) as `normed` multiplies and returns it, for several layers of one input."""
        if self.pending.size > 1:
            if isinstance(self.pending, TokenParts) and norm is not None and self.pending.divides(x_TI, residual_TI):
                pieces = list(self.pending.pieces(x_TI, residual_TI, norm.weight, norm.eps, self.ops))
                return torch.cat([n_TI for n_TI, _ in pieces]), torch.cat([s_TI for _, s_TI in pieces])
            return summed_norm(self.pending, self.ops, norm, x_TI, residual_TI)
        if norm is not None:
            return norm(x_TI, residual_TI)
        s_TI = x_TI if residual_TI is None else x_TI + residual_TI
        return s_TI, s_TI

    def normed_for(
        self, then: Linear, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None, gate: str
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Return the result of `normed`, in the form that suits the layer `then`."""
        plain = norm is None or norm.bias is not None or self.pending.size > 1
        if plain or not self.matrix.takes_rounded or not self.matrix.rounds_gated(len(x_TI), self.dtype):
            return self.normed(norm, x_TI, residual_TI, gate)
        if (buffer := then.buffer(len(x_TI))) is None:
            return self.normed(norm, x_TI, residual_TI, gate)
        assert norm is not None
        operand = Operand(x_TI, residual_TI, norm.weight, norm.eps)
        return buffer, self.matrix.norm_linear(operand, Epilogue(self.bias, gate, buffer))[1]

    def _summed(
        self, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None, gate: str | None
    ) -> tuple[Tensor, Tensor]:
        """Compute `normed` of an x that is still to be added up over ranks."""
        if isinstance(self.pending, TokenParts) and norm is not None and self.pending.divides(x_TI, residual_TI):
            pieces = self.pending.pieces(x_TI, residual_TI, norm.weight, norm.eps, self.ops)
            both = [(self._gated(n_TI, gate), s_TI) for n_TI, s_TI in pieces]
            return torch.cat([y_TO for y_TO, _ in both]), torch.cat([s_TI for _, s_TI in both])
        n_TI, s_TI = self.normed_input(norm, x_TI, residual_TI)
        return self._gated(n_TI, gate), s_TI

    def _gated(self, n_TI: Tensor, gate: str | None) -> Tensor:
        # Weights made of others take no operand without a norm
        plain = type(self.matrix) is FormedWeight and isinstance(self.matrix.form, Tensor)
        if gate and plain and self.over.size == 1:
            return self.matrix.norm_linear(Operand(n_TI), Epilogue(self.bias, gate))[0]
        y_TO = self(n_TI)
        return self.ops.gated_activation(y_TO, gate) if gate else y_TO
