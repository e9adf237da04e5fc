"""Experts' products on a CPU by the C++ of the folder cpu: one call for all experts that have tokens.

The matrices are laid out once, in float32 or bfloat16, and are read from end to end. Sums are in float32. They go
through the inputs, and through a token's experts, in one order, so a token's result does not depend on those beside it.

Legend:
    T  tokens
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, sorted by expert
    F  an expert's inner width
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
    B  panels of 32 outputs
    S  steps of a panel: an input in float32, two in bfloat16
    H  the two vectors of a panel
    L  the sixteen lanes of a vector
    N  the inputs of a step
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.native import library, openmp
from ridgeline.kernels.base.onednn import in_large_pages
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.gemm.experts import torch_ops
from ridgeline.kernels.gemm.route.op import Routes

SOURCE = Path(__file__).parent / "cpu" / "experts.cpp"
LANES, WIDE = 16, 32  # of a vector; outputs of a panel, as in cpu/
TYPES = {torch.float32: (0, 1), torch.bfloat16: (1, 2)}  # dtype → its number in cpu/, and the inputs of a step
MANY = 128  # pairs of an expert, on average, whose products take longer than its matrix takes to be written for tiles
ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("silu", "gelu", "gelu_tanh", "swiglu_clamped", "relu2", "silu_clamped_7", "silu_clamped_16")
    )
}

grouped_gate_up, grouped_down = torch_ops.grouped_gate_up, torch_ops.grouped_down  # of stacks that are not laid out


class _Experts(ctypes.Structure):
    _fields_ = (("panel", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("experts", "inputs", "outputs", "type")))


class _Call(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "bias", "start", "token", "place", "expert", "weight", "add", "y")),
        *((n, ctypes.c_int64) for n in ("tokens", "used", "gated", "activation", "threads")),
        ("parallel", ctypes.c_void_p),
    )


Function = Callable[[Any, Any], None]


@cache
def functions(target: str = "native") -> tuple[Function, Function] | None:
    """Return the compiled functions of both ops, or None where they cannot be compiled."""
    if (found := library(SOURCE, target)) is None:
        return None
    for function in (found.grouped_gate_up, found.grouped_down):
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return found.grouped_gate_up, found.grouped_down


@dataclass(frozen=True, eq=False)
class ExpertPanels:
    """One matrix of every expert, laid out for cpu/experts.cpp. It has no gradients.

    gated: the matrix is gate and up, which lie in turns of sixteen outputs.
    described: the matrices' description for C++.
    """

    panel_EBSHLN: Tensor
    gated: bool
    outputs: int
    described: _Experts
    functions: tuple[Function, Function]

    @property
    def nbytes(self) -> int:
        return self.panel_EBSHLN.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        """Compute the op `grouped_gate_up`."""
        if self.gated == (gate in UNGATED):
            raise ValueError(f"the panels of these experts are laid out {'' if self.gated else 'not '}to be gated.")
        if self._in_tiles(routes):
            return torch_ops.gate_up(self._linear, x_TM, bias_EO, routes, gate)
        inner = self.outputs // 2 if self.gated else self.outputs
        y_PF = x_TM.new_empty(len(routes.token_P), inner)
        self._run(0, x_TM, bias_EO, routes, None, y_PF, ACTIVATIONS[gate])
        return y_PF

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        """Compute the op `grouped_down`."""
        if self._in_tiles(routes):
            return torch_ops.down(self._linear, self.outputs, h_PF, bias_EM, routes, add_TM)
        y_TM = h_PF.new_empty(len(routes.expert_TK), self.outputs)
        self._run(1, h_PF, bias_EM, routes, add_TM, y_TM, 0)
        return y_TM

    def _in_tiles(self, routes: Routes) -> bool:
        """Return True if oneDNN had better multiply, which has tiles of bfloat16 (AMX) where the CPU has them."""
        many = len(routes.token_P) >= MANY * self.described.experts
        return many and self.panel_EBSHLN.dtype == torch.bfloat16 and has_tiles()

    def _linear(self, expert: int, rows_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(rows_NI, self.matrix(expert), bias_O)

    def matrix(self, expert: int) -> Tensor:
        """Return an expert's matrix as it was before it was laid out: [O, I]."""
        panel_BHLSN = self.panel_EBSHLN[expert].permute(0, 2, 3, 1, 4)
        parts = 2 if self.gated else 1
        each = panel_BHLSN.reshape(len(panel_BHLSN), parts, WIDE // parts, -1).movedim(1, 0).flatten(1, 2)
        return each[:, : self.outputs // parts].flatten(0, 1)

    def _run(
        self, op: int, x: Tensor, bias_EO: Tensor | None, routes: Routes, add: Tensor | None, y: Tensor, kind: int
    ) -> None:
        dtype, (experts, inputs) = self.panel_EBSHLN.dtype, (self.described.experts, self.described.inputs)
        floats = [
            None if given is None else _checked(given, dtype, shape)
            for given, shape in ((x, (len(x), inputs)), (bias_EO, (experts, self.outputs)), (add, tuple(y.shape)))
        ]
        whole = [
            _checked(given.int(), torch.int32, tuple(given.shape))
            for given in (routes.start_E1, routes.token_P, routes.place_TK, routes.expert_TK)
        ]
        if len(routes.start_E1) != experts + 1:
            raise ValueError(f"the routes are those of {len(routes.start_E1) - 1} experts, not of {experts}.")
        weight_TK = _checked(routes.weight_TK, torch.float32, tuple(routes.expert_TK.shape))
        place = [
            None if given is None else given.data_ptr() for given in (*floats[:2], *whole, weight_TK, floats[2], y)
        ]
        tokens, used = routes.expert_TK.shape
        call = _Call(*place, tokens, used, self.gated, kind, torch.get_num_threads(), openmp())
        self.functions[op](ctypes.byref(self.described), ctypes.byref(call))


def pack(weight_EOI: Tensor, gated: bool, compiled: tuple[Function, Function] | None = None) -> ExpertPanels | None:
    """Lay out a stack. Return None if its inputs do not fit into steps, its dtype is none of both, or without the
    compiled functions.

    gated: the outputs are those of gate, then those of up.
    compiled: the compiled functions (default: those for this machine).
    """
    experts, outputs, inputs = weight_EOI.shape
    number, each = TYPES.get(weight_EOI.dtype, (0, 0))
    if not each or inputs % each or (compiled := compiled or functions()) is None:
        return None
    parts, lanes = (2, LANES) if gated else (1, WIDE)
    panels = -(-outputs // (parts * lanes))
    panel_EBSHLN = weight_EOI.new_zeros(experts, panels, inputs // each, WIDE // LANES, LANES, each)
    for panel_BSHLN, weight_OI in zip(panel_EBSHLN, weight_EOI.detach(), strict=True):
        rows = weight_OI.unflatten(0, (parts, -1))
        rows = F.pad(rows, (0, 0, 0, panels * lanes - rows.shape[1])).view(
            parts, panels, -1, LANES, inputs // each, each
        )
        # A panel's vectors are parts, or halves of one part
        panel_BSHLN.copy_(rows.movedim(0, 1).flatten(1, 2).permute(0, 3, 1, 2, 4))
    in_large_pages(panel_EBSHLN)
    described = _Experts(panel_EBSHLN.data_ptr(), experts, inputs, outputs, number)
    return ExpertPanels(panel_EBSHLN, gated, outputs, described, compiled)


@cache
def has_tiles() -> bool:
    """Return True if the CPU multiplies tiles of bfloat16."""
    return torch.cpu._is_amx_tile_supported()


def _checked(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return x as C reads it. Raises ValueError if it is not what the panels need."""
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu":
        raise ValueError(f"the experts' product needs {dtype} {list(shape)} on a CPU, got {x.dtype} {list(x.shape)}.")
    return x.contiguous()
