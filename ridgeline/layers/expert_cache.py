"""Experts whose matrices lie in the host's memory, and a device that holds some of them.

A layer's cache has a number of slots. An expert that a step needs is copied into a slot, in place of the one that was
needed longest ago. The router of the next layer, applied to the present layer's input, says which experts that layer
will probably need (as in Eliseev and Mazur, arXiv 2312.17238, section 3.2); these are copied while this layer computes.

Which experts a step needs, the device knows: the host waits for it once a layer. So such steps are not captured.

Legend:
    T  tokens of the step
    M  model width
    E  experts
    S  slots
    K  experts of a token
    P  pairs of a token and one of its experts, sorted by expert
    C  pairs that are computed
    F  an expert's inner width
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.core.expert_cache import ExpertCacheFigures
from ridgeline.core.expert_spec import UNGATED
from ridgeline.kernels.grouped_gemm.torch_ops import down
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.route.op import Routes, without_waiting


class ExpertCache:
    """The slots of one layer. All copies run in a stream of their own, behind the last products that read the slots.

    host: gate and up, and down, of every expert, each with its bias or None. They are page-locked where `device` is a
        GPU.
    """

    def __init__(self, host: Sequence[Tensor | None], slots: int, device: torch.device, ops: Ops, gate: str) -> None:
        self._host, self._ops, self._gate, self._slots = [*host], ops, gate, slots
        self._held = [
            None if t is None else torch.empty(slots, *t.shape[1:], dtype=t.dtype, device=device) for t in host
        ]
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # expert → slot; who was needed longest ago comes first
        self._free = list(range(slots))
        self._guess: frozenset[int] | None = None  # what this step's experts are thought to be
        self._expert_bytes = sum(t[0].nbytes for t in host if t is not None)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.figures = ExpertCacheFigures()

    @property
    def nbytes(self) -> int:
        return self._slots * self._expert_bytes

    def foresee(self, experts: Collection[int]) -> None:
        """Begin to copy the experts that this layer will probably need next. More than there are slots are of no
        use."""
        if len(experts) <= self._slots:
            self._guess = frozenset(experts)
            self._bring(list(experts), experts)

    def begin(self, start: Sequence[int]) -> None:
        """Count what a step needs, and begin to copy it if it fits. start: `routes.start_E1`, on the host."""
        needed = wanted(start)
        self._count(needed)
        if len(needed) <= self._slots:
            self._bring(needed, needed)

    def sum(self, x_TM: Tensor, routes: Routes, start: Sequence[int], add_TM: Tensor | None) -> Tensor:
        """Return the weighted sum over the tokens' experts, plus `add_TM`, of the step that has begun."""
        needed = wanted(start)
        if len(needed) <= self._slots:
            return self._together(x_TM, routes, needed, add_TM)
        return self._one_by_one(x_TM, routes, needed, start, add_TM)

    def _together(self, x_TM: Tensor, routes: Routes, needed: Sequence[int], add_TM: Tensor | None) -> Tensor:
        """Multiply by the slots as by a stack of experts."""
        self._wait()
        slots = torch.full((len(routes.start_E1),), self._slots, dtype=torch.int32)
        slots[list(needed)] = torch.tensor([self._slot_of[expert] for expert in needed], dtype=torch.int32)
        slot_TK = slots.to(x_TM.device, non_blocking=True)[routes.expert_TK.long()]
        own = without_waiting(slot_TK, routes.weight_TK, self._slots)
        gate_up, gate_up_bias, down_weight, down_bias = self._held
        assert gate_up is not None
        assert down_weight is not None
        h_PF = self._ops.grouped_gate_up(x_TM, gate_up, gate_up_bias, own, self._gate)
        return self._ops.grouped_down(h_PF, down_weight, down_bias, own, add_TM)

    def _one_by_one(
        self, x_TM: Tensor, routes: Routes, needed: Sequence[int], start: Sequence[int], add_TM: Tensor | None
    ) -> Tensor:
        """Multiply expert by expert, those first that are here, and copy the next one meanwhile."""
        order = sorted(needed, key=lambda expert: expert not in self._slot_of)
        y_CM = torch.empty(start[-1], x_TM.shape[1], dtype=x_TM.dtype, device=x_TM.device)
        for expert, following in zip(order, [*order[1:], None], strict=True):
            self._bring([expert], [expert])
            self._wait()
            if following is not None and self._slots > 1:
                self._bring([following], [expert, following])
            slot, span = self._slot_of[expert], slice(start[expert], start[expert + 1])
            gate_up, gate_up_bias, down_weight, down_bias = (None if t is None else t[slot] for t in self._held)
            assert gate_up is not None
            assert down_weight is not None
            x_NM = x_TM.index_select(0, routes.token_P[span])
            h_NF = self._activated(F.linear(x_NM, gate_up, gate_up_bias))
            y_CM[span] = F.linear(h_NF, down_weight, down_bias)
        return down(lambda expert, y_NM, bias_M: y_NM, y_CM.shape[1], y_CM, None, routes, add_TM)

    def _activated(self, y_NG: Tensor) -> Tensor:
        apply = self._ops.activation if self._gate in UNGATED else self._ops.gated_activation
        return apply(y_NG, self._gate)

    def _bring(self, experts: Sequence[int], keep: Collection[int]) -> None:
        """Copy the experts that are not here, in place of others than those to keep."""
        missing = []
        for expert in experts:
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
                continue
            if not self._free:
                given_up = next(other for other in self._slot_of if other not in keep)
                self._free.append(self._slot_of.pop(given_up))
            self._slot_of[expert] = self._free.pop(0)
            missing.append(expert)
        if not missing:
            return
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))  # the slots may still be read
        with torch.cuda.stream(self._side):
            for host, held in zip(self._host, self._held, strict=True):
                if host is not None and held is not None:
                    for expert in missing:
                        held[self._slot_of[expert]].copy_(host[expert], non_blocking=True)
        self.figures = self.figures.plus(ExpertCacheFigures(copied=len(missing) * self._expert_bytes))

    def _wait(self) -> None:
        """Let products wait for the copies so far."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def _count(self, needed: Collection[int]) -> None:
        found = sum(expert in self._slot_of for expert in needed)
        guess, self._guess = self._guess, None
        foreseeable, foreseen = (0, 0) if guess is None else (len(needed), len(guess.intersection(needed)))
        self.figures = self.figures.plus(ExpertCacheFigures(len(needed), found, foreseeable, foreseen))


def wanted(start: Sequence[int]) -> list[int]:
    """Return the experts that have tokens, by `start_E1` of routes."""
    return [expert for expert in range(len(start) - 1) if start[expert] < start[expert + 1]]
