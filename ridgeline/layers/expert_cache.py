"""Experts whose matrices lie in the host's memory, and a device that holds some of them.

A layer's cache has a number of slots. An expert that a step needs is copied into a slot, in place of the one that was
needed longest ago. The router of the next layer, applied to the present layer's input, says which experts that layer
will probably need (as in Eliseev and Mazur, arXiv 2312.17238, section 3.2); these are copied while this layer computes.

Only the device knows the experts that a step needs, so the host waits for the device once a layer. Such steps are not
captured.

Legend:
    T  tokens of the step
    M  model width
    E  experts
    S  slots
    K  experts of a token
    P  pairs of a token and one of its experts, sorted by expert
    F  an expert's inner width
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ridgeline.core.plan.expert_cache import ExpertCacheFigures
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import Ops


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
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # expert → slot; the least recently needed comes first
        self._free = list(range(slots))
        self._guess: frozenset[int] | None = None  # what this step's experts are thought to be
        self._expert_bytes = sum(t[0].nbytes for t in host if t is not None)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.figures = ExpertCacheFigures()

    def bytes_per_second(self) -> float:
        """Return the rate at which experts come, by copies to all slots. Nothing may be in them yet."""
        best = 0.0
        for _ in range(3):
            self._synchronize()
            start = time.perf_counter()
            with torch.cuda.stream(self._side):
                for host, held in zip(self._host, self._held, strict=True):
                    if host is not None and held is not None:
                        for slot in range(self._slots):
                            held[slot].copy_(host[slot], non_blocking=True)
            self._synchronize()
            best = max(best, self.nbytes / max(time.perf_counter() - start, 1e-9))
        return best

    def _synchronize(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self._side.device)

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
        """Return the weighted sum over the tokens' experts, plus `add_TM`, of the step that has begun.

        Experts for which there are not slots enough come in groups: those that are here, and then others, which are
        copied while the group before is multiplied.
        """
        groups = self._groups(wanted(start))
        for group, following in zip(groups, [*groups[1:], []], strict=True):
            self._bring(group, group)
            self._wait()
            if len(group) + len(following) <= self._slots:
                self._bring(following, [*group, *following])
            add_TM = self._products(x_TM, routes, group, add_TM)
        assert add_TM is not None  # there is a group, if an empty one
        return add_TM

    def _groups(self, needed: list[int]) -> list[list[int]]:
        """Return the experts in the order of their products, with room for two groups of those that are to be
        copied."""
        if len(needed) <= self._slots:
            return [needed]
        here, missing = ([e for e in needed if (e in self._slot_of) is there] for there in (True, False))
        size = max(1, self._slots // 2)
        return [group for group in (here, *(missing[i : i + size] for i in range(0, len(missing), size))) if group]

    def _products(self, x_TM: Tensor, routes: Routes, group: Sequence[int], add_TM: Tensor | None) -> Tensor:
        """Multiply by the slots as by a stack of experts. Pairs of experts beyond the group go nowhere."""
        slots = torch.full((len(routes.start_E1),), self._slots, dtype=torch.int32)
        slots[list(group)] = torch.tensor([self._slot_of[expert] for expert in group], dtype=torch.int32)
        slot_TK = slots.to(x_TM.device, non_blocking=True)[routes.expert_TK.long()]
        own = self._ops.order_pairs(slot_TK, routes.weight_TK, self._slots)
        gate_up, gate_up_bias, down_weight, down_bias = self._held
        assert gate_up is not None
        assert down_weight is not None
        h_PF = self._ops.grouped_gate_up(x_TM, gate_up, gate_up_bias, own, self._gate)
        return self._ops.grouped_down(h_PF, down_weight, down_bias, own, add_TM)

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
