"""Linear attention, delta attention and RWKV's weighted mean on a GPU: check every implementation, then time it.

    python benchmarks/sweep_linear.py --json results.jsonl [--case gla] [--op prefill]

"step" is a step of one token for so many requests, "prefill" one row of so many tokens, "rows" as many tokens in rows
of 512, "mixed" a prompt, four rows of 512 and 64 requests of one token. "check" compares ragged rows, with marks and
fresh states over NaN, with the recurrence in float64. What is timed is compared with the implementation in plain torch.

Shapes: gla is a layer of gated linear attention with 4 heads of 256 by 512, retnet one of RetNet with 16 heads of 128
by 256, kda one of Kimi Linear with 32 heads of 128 by 128, rwkv one of RWKV-4 with 4096 channels.

A limit is the larger of bytes / 4.42 TB/s and FLOPs / 750 TFLOP/s of the op's least work. Errors are relative to
|result| + the root mean square of all results. sweeping_runs.py says how it is done.

Legend: see kernels/linear_attention/op.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from benchmarks.sweep_scans import CHECKED, MARKS, lengths_of
from benchmarks.sweeping import Job, Limit, Sweep, moved
from benchmarks.sweeping_runs import run
from ridgeline.core.cost import Cost
from ridgeline.kernels.gated_delta.cases import channel_case
from ridgeline.kernels.gated_delta.op import DELTA_ATTENTION
from ridgeline.kernels.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.linear_attention.op import LINEAR_ATTENTION
from ridgeline.kernels.op import Op
from ridgeline.kernels.wkv.cases import WkvCase
from ridgeline.kernels.wkv.cost import wkv_cost
from ridgeline.kernels.wkv.op import WKV

Forms = dict[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Layer:
    """A layer: how its inputs and least work follow from the rows, and the forms of its op."""

    inputs: Callable[..., Any]  # (lengths, marks, fresh, small) → a case
    cost: Callable[[Sequence[int]], Cost]
    forms: Forms


def _attention(decay: str, heads: int, keys: int, values: int, decay_bytes: float) -> Layer:
    def case(lengths: tuple[int, ...], marks: tuple[int, ...], fresh: tuple[int, ...], small: Any) -> Any:
        return LinearAttentionCase(
            lengths, small(heads, 2), small(keys, 16), small(values, 16), marks=marks, fresh=fresh, decay=decay
        )

    def cost(lengths: Sequence[int]) -> Cost:
        shape = {"heads": heads, "key_width": keys, "value_width": values, "itemsize": 2.0}
        return linear_attention_cost(lengths, **shape, decay_bytes=decay_bytes)

    return Layer(case, cost, _forms(LINEAR_ATTENTION))


def _kda(heads: int, width: int) -> Layer:
    def case(lengths: tuple[int, ...], marks: tuple[int, ...], fresh: tuple[int, ...], small: Any) -> Any:
        widths = {"key_width": small(width, 16), "value_width": small(width, 16)}
        return channel_case(lengths, small(heads, 2), **widths, marks=marks, fresh=fresh)

    def cost(lengths: Sequence[int]) -> Cost:
        shape = {"heads": heads, "key_width": width, "value_width": width, "itemsize": 2.0}
        return linear_attention_cost(lengths, **shape, decay_bytes=2.0 * heads * (width + 1), delta=True)

    return Layer(case, cost, _forms(DELTA_ATTENTION))


def _wkv(channels: int) -> Layer:
    def case(lengths: tuple[int, ...], marks: tuple[int, ...], fresh: tuple[int, ...], small: Any) -> Any:
        return WkvCase(lengths, small(channels, 32), marks, fresh)

    def cost(lengths: Sequence[int]) -> Cost:
        return wkv_cost(sum(lengths), sum(length > 0 for length in lengths), channels, itemsize=2.0)

    return Layer(case, cost, _forms(WKV))


def _forms(op: Op[Any]) -> Forms:
    loaded = {implementation.name: implementation.load() for implementation in op.implementations}
    return {"": loaded["triton"], "walked": loaded["batch_invariant"], "exact": op.reference, "torch": loaded["torch"]}


LAYERS = {
    "gla": _attention("channel", 4, 256, 512, 4.0 * 4 * 256),
    "retnet": _attention("head", 16, 128, 256, 0.0),
    "kda": _kda(32, 128),
    "rwkv": _wkv(4096),
}


class Linear(Sweep):
    workload = "linear attention"
    seconds, tolerance = 90.0, 0.05
    _compared = False

    def jobs(self) -> list[Job]:
        found = []
        for case in LAYERS:
            found += [Job(case, "check", sum(CHECKED), "", cut, timed=False) for cut in (None, "walked")]
            found += [Job(case, "prefill", tokens, "", None, True) for tokens in (8192, 65_536, 1024)]
            found += [Job(case, "rows", 8192, "", None, True), Job(case, "mixed", 4096, "", None, True)]
            found += [Job(case, "step", tokens, "", None, True) for tokens in (256, 64, 8, 1)]
        return sorted(found, key=lambda job: job.timed)

    def inputs(self, job: Job, device: torch.device) -> tuple[Any, ...]:
        lengths = lengths_of(job.op, job.tokens)
        marks, fresh = (MARKS, (0, 3)) if job.op == "check" else ((), ())
        if self.dry or self.device.type == "meta":
            lengths = tuple(min(length, 5 if self.dry else 5000) for length in lengths[:3])
            marks, fresh = marks[:3], fresh[:1]
        found: tuple[Any, ...] = LAYERS[job.case].inputs(lengths, marks, fresh, self.small).inputs(self.dtype, device)
        return found

    def arguments(self, job: Job) -> list[Any]:
        if self.device.type == "meta":
            return [moved(self.inputs(job, torch.device("cpu")), self.device)]
        given = self.inputs(job, self.device)
        nbytes = sum(x.nbytes for x in (*vars(given[0]).values(), given[1]) if isinstance(x, Tensor))
        return [given, *(with_own_states(given) for _ in range(min(8, self.turns(nbytes)) - 1))]

    def launch(self, job: Job, arguments: Any) -> Any:
        """Return the outputs, and the states if results are compared, which are then not replaced."""
        given = with_own_states(arguments) if self._compared else arguments
        o = LAYERS[job.case].forms[job.cut or ""](*given)
        return (o, written(given)) if self._compared else o

    def reference(self, job: Job, arguments: Any) -> Any:
        given = with_own_states(arguments)
        return LAYERS[job.case].forms["torch" if job.timed else "exact"](*given), written(given)

    def check(self, job: Job, arguments: Any) -> float | None:
        self._compared = True
        try:
            return super().check(job, arguments)
        finally:
            self._compared = False

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return self.error_of_sums(got, want)

    def time(self, job: Job, calls: list[Any], least: float) -> float:
        """Time it on copies of the states, which every launch replaces."""
        return super().time(job, [with_own_states(given) for given in calls], least)

    def interpreted(self, job: Job) -> Any:
        return (job.case, job.op) if job.op in ("check", "step") else None

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        cost = LAYERS[job.case].cost(lengths_of(job.op, job.tokens))
        return self.least(cost.bytes, cost.flops, note=f"{cost.bytes / 1e6:.0f} MB")


def with_own_states(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same arguments with a copy of the states."""
    inputs, states, turns = given
    return inputs, states.clone(), turns


def written(given: tuple[Any, ...]) -> Tensor:
    """Return the states that a step has written, and behind them those at marks."""
    _, states, turns = given
    marked_R = turns.marked_R[turns.marks_R > 0] if turns.marks_R.any() else turns.marked_R[:0]
    return states[torch.cat((turns.writes_R[turns.writes_R > 0], marked_R))]


if __name__ == "__main__":
    run(Linear)
