"""A weight to whose products those of each token's adapter are added.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ridgeline.kernels.gemm.lora.op import AdapterFactors, TokensByAdapter
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.quantization.weight import WrappedWeight


@dataclass
class StepAdapters:
    """The adapters of the step under way, which all adapted weights look at.

    tokens: None: no token has one.
    line_T: the line of each token in `AdapterVectors`, where adapters have such. int64.
    """

    tokens: TokensByAdapter | None = None
    line_T: Tensor | None = None


class AdapterVectors(NamedTuple):
    """The factors of all adapters for one linear map, float32. The last line changes nothing, for tokens without an
    adapter.

    input_AI: multiplies inputs. output_AO: multiplies outputs, with the bias. added_AO: is added to them then.
    """

    input_AI: Tensor
    output_AO: Tensor
    added_AO: Tensor


@dataclass(frozen=True)
class AdaptedWeight(WrappedWeight):
    """A weight in any form, and the matrices of the adapters that the device holds, with their vectors if they may have
    such. Where no token of a step has an
    adapter, it multiplies as `inner` does. Otherwise norms and gates are ops of their own."""

    factors: AdapterFactors
    step: StepAdapters
    vectors: AdapterVectors | None = None

    @property
    def adapts(self) -> bool:
        return self.step.tokens is not None

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        if (tokens := self.step.tokens) is None:
            return self.inner.linear(x_TI, bias_O)
        assert isinstance(x_TI, Tensor)  # there is no buffer
        assert len(tokens.order_T) == len(x_TI)
        y_TO = self._multiplied(x_TI, bias_O, self.step.line_T)
        self.ops.lora(y_TO, x_TI, self.factors, tokens)
        return y_TO

    def _multiplied(self, x_TI: Tensor, bias_O: Tensor | None, line_T: Tensor | None) -> Tensor:
        if self.vectors is None or line_T is None:
            return self.inner.linear(x_TI, bias_O)
        input_AI, output_AO, added_AO = self.vectors
        y_TO = self.inner.linear((x_TI * input_AI[line_T]).to(x_TI.dtype), bias_O)
        wide_TO = y_TO * output_AO[line_T]
        return (wide_TO + added_AO[line_T]).to(y_TO.dtype)

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.inner.norm_linear(x, epilogue) if self.step.tokens is None else super().norm_linear(x, epilogue)
