"""A weight to whose products those of each token's adapter are added.

Legend:
    T  tokens
    I  inputs
    O  outputs
    A  places of adapters
    V  rows of an embedding's table, on this rank
    R  the most that an adapter's rank may be there
    M  width of the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.gemm.lora.op import AdapterFactors, StepFactors, TokensByAdapter, beside
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.weight import FormedWeight, WrappedWeight


@dataclass
class StepAdapters:
    """The adapters of the step under way, which all adapted weights look at.

    tokens: None: no token has one.
    line_T: the line of each token in `AdapterVectors`, where adapters have such. int64.
    """

    tokens: TokensByAdapter | None = None
    line_T: Tensor | None = None

    @property
    def adapts(self) -> bool:
        """True if a token of the step may have an adapter."""
        return self.tokens is not None

    def of(self, rows: int) -> tuple[TokensByAdapter, Tensor | None]:
        """Return the tokens by adapter, and their lines, of so many rows: those of the step."""
        assert self.tokens is not None
        assert len(self.tokens.order_T) == rows
        return self.tokens, self.line_T


@dataclass
class LoneAdapter(StepAdapters):
    """The one adapter of all rows of an encoder's run, however many its maps have: squares of patches are merged.

    places: of adapters on the device. place: the one that runs, from 1; 0: none.
    """

    places: int = 1
    place: int = 0
    device: torch.device | None = None

    @property
    def adapts(self) -> bool:
        return self.place > 0

    def of(self, rows: int) -> tuple[TokensByAdapter, Tensor | None]:
        order_T = torch.arange(rows, dtype=torch.int32, device=self.device)
        start_A1 = torch.zeros(self.places + 1, dtype=torch.int32, device=self.device)
        start_A1[self.place :].fill_(rows)
        found = TokensByAdapter(order_T, start_A1, torch.full_like(order_T, self.place))
        return found, torch.full_like(order_T, self.place - 1, dtype=torch.int64)


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
    such. Where no token of a step has an adapter, it multiplies as `inner` does. Otherwise the op of a plain weight on
    a GPU adds products of adapters itself. With other weights, and with vectors, norms, gates and adapters are ops of
    their own."""

    factors: AdapterFactors
    step: StepAdapters
    vectors: AdapterVectors | None = None

    @property
    def adapts(self) -> bool:
        return self.step.adapts

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        if not self.step.adapts:
            return self.inner.linear(x_TI, bias_O)
        assert isinstance(x_TI, Tensor)  # there is no buffer
        tokens, line_T = self.step.of(len(x_TI))
        if self._adds(tokens):
            return self.inner.norm_linear(Operand(x_TI), Epilogue(bias_O, adapters=StepFactors(self.factors, tokens)))[
                0
            ]
        y_TO = self._multiplied(x_TI, bias_O, line_T)
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
        if not self.step.adapts:
            return self.inner.norm_linear(x, epilogue)
        tokens, _ = self.step.of(len(x.x_TI))
        if self._adds(tokens):
            return self.inner.norm_linear(x, epilogue._replace(adapters=StepFactors(self.factors, tokens)))
        return super().norm_linear(x, epilogue)

    def _adds(self, tokens: TokensByAdapter) -> bool:
        """Return True if the op of `inner` adds what adapters make of these tokens."""
        inner = self.inner
        plain = isinstance(inner, FormedWeight) and isinstance(inner.form, Tensor) and self.vectors is None
        return plain and self.ops.chosen["norm_linear"] == "triton" and beside(self.factors, tokens)


@dataclass(frozen=True)
class AdaptedRows:
    """The rows that the adapters on the device add to those of an embedding's table.

    thin_AVR: what each row is in the first matrix of each adapter.
    factors: the second matrices; the first ones are unit matrices here.
    """

    ops: Ops
    thin_AVR: Tensor
    factors: AdapterFactors
    step: StepAdapters

    def add(self, x_TM: Tensor, row_T: Tensor) -> None:
        """Add to rows that were looked up, in place. row_T: their numbers; those outside the table get nothing."""
        if not self.step.adapts:
            return
        tokens, line_T = self.step.of(len(x_TM))
        assert line_T is not None
        places, rows, _ = self.thin_AVR.shape
        there_T = (row_T >= 0) & (row_T < rows)
        at_T = line_T.clamp(max=places - 1) * rows + row_T.long().clamp(0, rows - 1)
        thin_TR = self.thin_AVR.flatten(0, 1).index_select(0, at_T) * there_T[:, None]
        self.ops.lora(x_TM, thin_TR, self.factors, tokens)
