"""Linear layers; several projections of one input may be fused. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.build import Build
from ridgeline.layers.norm import Norm


class Linear(nn.Module):
    """`parts`: rows of each fused projection, in order; the weight is [sum(parts), inputs]. tied: another's weight."""

    def __init__(
        self, inputs: int, parts: tuple[int, ...], bias: bool, build: Build, *, tied: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.parts = parts
        self.ops = build.ops
        self.weight = tied if tied is not None else build.parameter(sum(parts), inputs)
        self.bias = build.parameter(sum(parts)) if bias else None

    def prepare(self) -> None:
        """Bring the loaded weight into the form the ops read fastest, and let the plain one go, unless another holds it
        too. The layer can then neither be trained nor exported."""
        weight = self.ops.prepare_weight(self.weight)
        if weight is not self.weight:
            del self.weight
            self.weight = weight

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of `x_TI`."""
        return self.ops.linear(x_TI, self.weight, self.bias)

    def normed(
        self, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None, gate: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """(this layer of norm(s), s) with s = x + residual, or x where there is none yet; one op where the norm is RMS.

        norm None: of s itself. gate: the activation of a gated pair: act(first half of the outputs) * second half.
        """
        if norm is not None and norm.bias is None:
            return self.ops.norm_linear(x_TI, residual_TI, norm.weight, norm.eps, self.weight, self.bias, gate)
        if norm is None:
            y_TI = s_TI = x_TI if residual_TI is None else x_TI + residual_TI
        else:
            y_TI, s_TI = norm(x_TI, residual_TI)
        y_TO = self(y_TI)
        return (self.ops.gated_activation(y_TO, gate) if gate else y_TO), s_TI
