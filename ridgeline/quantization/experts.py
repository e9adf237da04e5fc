"""The forms that experts' stacked weights take.

Where the grouped ops multiply a whole stack at once, as on a GPU, the stack stays as it was loaded. Elsewhere, and for
schemes that hold one matrix at a time, it becomes a list of `Weight`s, which are multiplied one expert after the other.

Legend:
    T  tokens
    M  model width
    E  experts
    P  pairs of a token and one of its experts, sorted by expert
    F  an expert's inner width
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ridgeline.kernels.grouped_gemm.torch_ops import down, gate_up
from ridgeline.kernels.onednn import together_in_large_pages
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.route.op import Routes
from ridgeline.quantization.held import Filling, one_by_one
from ridgeline.quantization.scheme import PlainWeight, Scheme, Weight


class ExpertWeights(Protocol):
    """One matrix of every expert, in any form that can multiply. The operations are those of `kernels/grouped_gemm`."""

    @property
    def nbytes(self) -> int: ...

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor: ...

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class StackedWeights:
    """Weights as they were loaded."""

    ops: Ops
    weight_EOI: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight_EOI.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        return self.ops.grouped_gate_up(x_TM, self.weight_EOI, bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        return self.ops.grouped_down(h_PF, self.weight_EOI, bias_EM, routes, add_TM)


@dataclass(frozen=True)
class ListedWeights:
    """One `Weight` for each expert, of any scheme. It reads the counts back to the host, so it is for CPUs."""

    weights: list[Weight]
    outputs: int

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        return gate_up(self._linear, x_TM, bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        return down(self._linear, self.outputs, h_PF, bias_EM, routes, add_TM)

    def _linear(self, expert: int, rows_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.weights[expert].linear(rows_NI, bias_O)


def prepare_experts(loaded: StackedWeights, scheme: Scheme) -> ExpertWeights:
    """Return the weights in the form of their scheme, or `loaded` itself where no other form is faster."""
    matrices = [PlainWeight(loaded.ops, matrix) for matrix in loaded.weight_EOI.detach().unbind()]
    prepared = [scheme.prepare(matrix) for matrix in matrices]
    if all(new is old for new, old in zip(prepared, matrices, strict=True)):
        return loaded
    together_in_large_pages([weight.stored for weight in prepared])
    return ListedWeights(prepared, loaded.weight_EOI.shape[1])


def keeps_stacks(ops: Ops) -> bool:
    """Return True if stacks can be multiplied in the form of their files."""
    return ops.platform.device_type == "cpu"  # one expert after the other


def held_experts(ops: Ops, filling: Filling) -> ExpertWeights:
    """Return a filled stack in the form of its files, of which experts are multiplied one after the other."""
    outputs = sum(filling.parts.values())
    return ListedWeights(one_by_one(ops, filling), outputs)
