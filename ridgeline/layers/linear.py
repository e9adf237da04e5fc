"""Linear layers; several projections of one input may be fused. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.build import Build
from ridgeline.layers.norm import Norm
from ridgeline.quantization.scheme import PlainWeight, Weight


class Linear(nn.Module):
    """`parts`: rows of each fused projection, in order; the weight is [sum(parts), inputs]. tied: another's weight.

    weight: the parameter that is loaded and trained, None once another form has taken its place. matrix: what
    multiplies.
    """

    weight: nn.Parameter | None
    matrix: Weight

    def __init__(
        self, inputs: int, parts: tuple[int, ...], bias: bool, build: Build, *, tied: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.parts = parts
        self.ops = build.ops
        self.scheme = build.scheme
        self.weight = weight = tied if tied is not None else build.parameter(sum(parts), inputs)
        self.bias = build.parameter(sum(parts)) if bias else None
        self.matrix = PlainWeight(build.ops, weight)

    def prepare(self) -> None:
        """Hold the loaded weight as the scheme has it, and let the parameter go if that is another form (a tied one
        stays with its other owner). The layer can then neither be trained nor exported."""
        if self.weight is None:
            return
        loaded = PlainWeight(self.ops, self.weight)
        self.matrix = self.scheme.prepare(loaded)
        if self.matrix is not loaded:
            self.weight = None

    @property
    def prepared_bytes(self) -> int:
        """Memory of the weight where it is no parameter."""
        return self.matrix.nbytes if self.weight is None else 0

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of `x_TI`."""
        return self.matrix.linear(x_TI, self.bias)

    def normed(
        self, norm: Norm | None, x_TI: Tensor, residual_TI: Tensor | None, gate: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """(this layer of norm(s), s) with s = x + residual, or x where there is none yet; one op where the norm is RMS.

        norm None: of s itself. gate: the activation of a gated pair: act(first half of the outputs) * second half.
        """
        if norm is not None and norm.bias is None:
            return self.matrix.norm_linear(x_TI, residual_TI, norm.weight, norm.eps, self.bias, gate)
        if norm is None:
            y_TI = s_TI = x_TI if residual_TI is None else x_TI + residual_TI
        else:
            y_TI, s_TI = norm(x_TI, residual_TI)
        y_TO = self(y_TI)
        return (self.ops.gated_activation(y_TO, gate) if gate else y_TO), s_TI
