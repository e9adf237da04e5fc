"""A weight to whose products those of each token's adapter are added.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.kernels.gemm.lora.op import AdapterFactors, TokensByAdapter
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.weight import Weight


@dataclass
class StepAdapters:
    """The adapters of the step under way, which all adapted weights look at. tokens: None: no token has one."""

    tokens: TokensByAdapter | None = None


@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """A weight in any form, and the matrices of the adapters that the device holds. Where no token of a step has an
    adapter, it multiplies as `inner` does. Otherwise norms and gates are ops of their own."""

    ops: Ops
    inner: Weight
    factors: AdapterFactors
    step: StepAdapters

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def stored(self) -> Tensor:
        return self.inner.stored

    @property
    def adapts(self) -> bool:
        return self.step.tokens is not None

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        y_TO = self.inner.linear(x_TI, bias_O)
        if (tokens := self.step.tokens) is not None:
            assert isinstance(x_TI, Tensor)  # there is no buffer
            assert len(tokens.order_T) == len(x_TI)
            self.ops.lora(y_TO, x_TI, self.factors, tokens)
        return y_TO

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.inner.norm_linear(x, epilogue) if self.step.tokens is None else super().norm_linear(x, epilogue)
