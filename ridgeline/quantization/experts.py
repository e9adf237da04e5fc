"""The forms that experts' stacked weights take.

Where the grouped ops multiply a whole stack at once, as on a GPU, it stays a stack: as it was loaded, or in FP8 or in
codes. On a CPU plain numbers are laid out in panels. Elsewhere a stack becomes a list of `Weight`s, which are
multiplied one expert after the other.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.kernels.base.onednn import together_in_large_pages
from ridgeline.kernels.base.op import REFERENCE
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format, Held
from ridgeline.kernels.gemm.codes.op import CODED_LINEAR, Coded
from ridgeline.kernels.gemm.experts.matrices import Matrices, Quantized, arranged, part, shape_of, stacked
from ridgeline.kernels.gemm.experts.panels import pack
from ridgeline.kernels.gemm.experts.torch_ops import down, gate_up
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.held import Filling, formed, one_by_one
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import FormedWeight, Weight, tensors_in, weight_of


class ExpertWeights(Protocol):
    """One matrix of every expert, in any form that can multiply. The operations are those of `kernels/gemm/experts`."""

    @property
    def nbytes(self) -> int: ...

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor: ...

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class StackedWeights:
    """Weights as they were loaded, or in FP8 or in codes, with the experts in front of each tensor."""

    ops: Ops
    weight: Matrices

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        return self.ops.grouped_gate_up(x_TM, self.weight, bias_EO, routes, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        return self.ops.grouped_down(h_PF, self.weight, bias_EM, routes, add_TM)


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


def tensors_of(weights: ExpertWeights, expert: int) -> list[Tensor]:
    """Return all tensors of one expert's matrix, in which it can be written over."""
    if isinstance(weights, ListedWeights):
        return list(tensors_in(weights.weights[expert]))
    return [tensor[expert] for tensor in tensors_in(weights)]  # in every other form experts are the first dimension


def prepare_experts(loaded: StackedWeights, scheme: Scheme, gated: bool = False) -> ExpertWeights:
    """Return the weights in the form of their scheme, or `loaded` itself where no other form is faster. A quantized
    stack keeps its form.

    gated: a matrix is gate and up.
    """
    ops, weight = loaded.ops, loaded.weight
    if not isinstance(weight, Tensor):
        return loaded if multiplies_stacks(ops) else _listed(ops, weight)
    in_panels = scheme.name == "plain" and _chosen(ops) == {"panels"}
    if in_panels and (panels := pack(weight, gated)) is not None:
        return panels
    matrices = weight.detach().unbind()
    # Kernels of stacks take codes in the order of `Coded`, and not in one for the product of a single matrix
    own = Ops(ops.platform, {**ops.chosen, CODED_LINEAR.name: REFERENCE}) if multiplies_stacks(ops) else ops
    # One matrix at a time, since rounding takes float32 copies
    prepared = [scheme.prepare(own, matrix) for matrix in matrices]
    forms = [each.form for each in prepared if isinstance(each, FormedWeight) and isinstance(each.form, Fp8 | Coded)]
    if multiplies_stacks(ops) and forms:
        stack = stacked(forms)
        half = shape_of(stack)[1] // 2  # there may be two parts
        return StackedWeights(ops, _arranged(ops, stack, weight.dtype, (half, half)))
    if all(new.stored is old for new, old in zip(prepared, matrices, strict=True)):
        return loaded
    together_in_large_pages([each.stored for each in prepared])
    return ListedWeights(prepared, weight.shape[1])


def keeps_stacks(ops: Ops, helds: Sequence[Held | None]) -> bool:
    """Return True if stacks of these forms can be multiplied in the form of their files. On a CPU that is done one
    expert after the other, on a GPU by kernels, of which none takes int8."""
    whole = all(held is not None and isinstance(held.format, Fp8Format | CodedFormat) for held in helds)
    return ops.platform.device_type == "cpu" or (multiplies_stacks(ops) and whole)


def held_experts(ops: Ops, filling: Filling, dtype: torch.dtype) -> ExpertWeights:
    """Return a filled stack in the form of its files: a stack where the grouped ops are kernels, otherwise a weight for
    each expert. dtype: of the activations."""
    if filling.held is not None and multiplies_stacks(ops) and keeps_stacks(ops, [filling.held]):
        stack = formed(filling.held, filling.tensors)
        assert not isinstance(stack, Levels)  # no kernel takes stacks of them
        return StackedWeights(ops, _arranged(ops, stack, dtype, tuple(filling.parts.values())))
    return ListedWeights(one_by_one(ops, filling, dtype), sum(filling.parts.values()))


def multiplies_stacks(ops: Ops) -> bool:
    """Return True if the grouped ops are kernels, which multiply a whole stack at once."""
    return not _chosen(ops) & {"panels", "torch", REFERENCE}


def _arranged(ops: Ops, stack: Quantized, dtype: torch.dtype, parts: Sequence[int]) -> Quantized:
    """Return the stack as the chosen ops want it in memory. parts: outputs of each."""
    return arranged(stack, dtype, parts) if _chosen(ops) == {"triton"} else stack


def _chosen(ops: Ops) -> set[str]:
    return {ops.chosen["grouped_gate_up"], ops.chosen["grouped_down"]}


def _listed(ops: Ops, weight: Quantized) -> ListedWeights:
    """Return one `Weight` for each expert."""
    experts, outputs, _ = shape_of(weight)
    return ListedWeights([weight_of(ops, part(weight, expert)) for expert in range(experts)], outputs)
