"""Mamba's selective scan and Mamba-2's recurrence on a GPU: check every implementation, then time it.

    python benchmarks/sweep_scans.py --json results.jsonl [--case mamba2-g1] [--op prefill]

"step" is a step of one token for so many requests, "prefill" one row of so many tokens, "rows" as many tokens in rows
of 512, "mixed" a prompt, four rows of 512 and 64 requests of one token. "check" compares ragged rows, with marks and
fresh states over NaN, with the recurrence in float64. What is timed is compared with the implementation in plain torch.

"vllm" are vLLM's kernels on the same inputs, where it can be imported: `mamba_chunk_scan_combined_varlen` with its
chunks of 256 tokens and `selective_state_update`, or `selective_scan_fn`, whose inputs are channels first. Those for
prefill do not gather rows' states nor put them back, so they have a little less to do. When they are first launched
they try many cuts, for which `--seconds` may have to be longer.

A limit is the larger of bytes / 4.42 TB/s and FLOPs / 750 TFLOP/s; for the selective scan, of the bytes and of
exponentials at 16 a cycle and multiprocessor. Errors are
relative to |result| + the root mean square of all results. sweeping_runs.py says how it is
done.

Legend: see kernels/ssd/op.py and kernels/selective_scan/op.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from benchmarks.sweeping import Job, Limit, Sweep, moved
from benchmarks.sweeping_runs import run
from ridgeline.kernels.selective_scan import op as scan_op
from ridgeline.kernels.selective_scan import torch_ops as scan_torch
from ridgeline.kernels.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.selective_scan.cost import selective_scan_cost
from ridgeline.kernels.selective_scan.triton import PROMPTS, selective_scan, selective_scan_in_order
from ridgeline.kernels.selective_scan.triton_tiles import Tiles
from ridgeline.kernels.selective_scan.triton_walk import LONG
from ridgeline.kernels.selective_scan.triton_walk import Walk as ScanWalk
from ridgeline.kernels.ssd import op as ssd_op
from ridgeline.kernels.ssd import torch_ops as ssd_torch
from ridgeline.kernels.ssd.cases import SsdCase
from ridgeline.kernels.ssd.choose import Cut, choose
from ridgeline.kernels.ssd.cost import ssd_cost
from ridgeline.kernels.ssd.triton import ssd, ssd_in_order
from ridgeline.kernels.ssd.triton_walk import Walk as SsdWalk

VLLM_CHUNK = 256
EXPONENTIALS = 16 * 132 * 1.755e9  # a second, of an H200
HAS_VLLM = importlib.util.find_spec("vllm") is not None


@dataclass(frozen=True)
class Shape:
    """A layer. heads: 0 for Mamba, whose head_width is its channels."""

    heads: int
    groups: int
    head_width: int
    state_width: int


SHAPES = {
    "mamba2-g1": Shape(128, 1, 64, 128),
    "mamba2-g8": Shape(128, 8, 64, 128),
    "falcon-h1": Shape(32, 2, 64, 256),
    "falcon-mamba": Shape(0, 0, 8192, 16),
}
# Those that matter most first: the first few are timed with every number of tokens
SCAN_CUTS = (Tiles(), Tiles(4, 16), Tiles(4, 32), LONG, Tiles(2, 16), Tiles(2, 8), Tiles(4, 4))
SSD_CUTS = (Cut(), Cut(outputs="shared"), Cut(segment=4096), Cut(segment=1024), Cut(outputs="shared", warps=8))
ALWAYS = 4  # cuts
CHECKED = (5, 1, 0, 130, 2, 700, 1, 65)
MARKS = (2, 1, 0, 64, 0, 513, 0, 65)


def lengths_of(op: str, tokens: int) -> tuple[int, ...]:
    """Return the tokens of each row."""
    if op == "check":
        return CHECKED
    if op == "step":
        return (1,) * tokens
    if op == "rows":
        return (512,) * (tokens // 512)
    if op == "mixed":
        return (tokens - 4 * 512 - 64, *(512,) * 4, *(1,) * 64)
    return (tokens,)


class Scans(Sweep):
    workload = "state space scans"
    seconds, tolerance = 95.0, 0.05
    start, silence = 45.0, 120.0  # vLLM's kernels try their cuts when they are first launched
    _compared = False

    def jobs(self) -> list[Job]:
        found = []
        for case, shape in SHAPES.items():
            chosen = choose(shape.heads, shape.head_width, shape.state_width)
            cuts = self._cuts(case, chosen)
            found += [Job(case, "check", sum(CHECKED), "", cut, timed=False) for cut in [None, "walked", *cuts]]
            for tokens in (8192, 65_536, 1024):
                most = len(cuts) if tokens == 8192 else ALWAYS
                found += [Job(case, "prefill", tokens, "", cut, cut == cuts[0]) for cut in cuts[:most]]
                found += [Job(case, "prefill", tokens, "", "vllm")] if HAS_VLLM else []
            for op, tokens in (("rows", 8192), ("mixed", 4096)):
                found += [Job(case, op, tokens, "", cut, cut == cuts[0]) for cut in cuts[:2]]
                found += [Job(case, op, tokens, "", "vllm")] if HAS_VLLM and op == "rows" else []
            for tokens in (256, 64, 8, 1):
                walks = self._walks(case)
                found += [Job(case, "step", tokens, "", cut, cut == walks[0]) for cut in walks]
                found += [Job(case, "step", tokens, "", "vllm")] if HAS_VLLM else []
        order = ("check", "prefill", "step", "rows", "mixed")
        return sorted(found, key=lambda job: (job.timed, list(SHAPES).index(job.case) > 1, order.index(job.op)))

    @staticmethod
    def _cuts(case: str, chosen: Cut) -> list[Any]:
        """Return the chosen cut, then others that might be faster."""
        if case == "falcon-mamba":
            return list(dict.fromkeys((PROMPTS, *SCAN_CUTS)))
        if case == "mamba2-g1":
            return list(dict.fromkeys((chosen, *SSD_CUTS)))
        return [chosen, *(replace(chosen, outputs="shared") for _ in range(SHAPES[case].state_width <= 128))]

    @staticmethod
    def _walks(case: str) -> list[Any]:
        walk = ScanWalk if case == "falcon-mamba" else SsdWalk
        return [walk(), walk(2048), walk(8192), walk(2048, 2)]

    def inputs(self, job: Job, device: torch.device) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        shape, lengths = SHAPES[job.case], lengths_of(job.op, job.tokens)
        marks: tuple[int, ...] = ()
        fresh: tuple[int, ...] = ()
        if job.op == "check":
            marks, fresh = MARKS, (0, 3)
        if self.dry:
            lengths, marks = tuple(min(length, 5) for length in lengths[:3]), marks[:3]
        elif self.device.type == "meta":
            lengths, marks = tuple(min(length, 5000) for length in lengths[:3]), marks[:3]
        if shape.heads == 0:
            channels = self.small(shape.head_width, 16)
            scan = SelectiveScanCase(lengths, channels, shape.state_width, marks=marks, fresh=fresh)
            return scan.inputs(self.dtype, device)
        heads, groups = self.small(shape.heads, 2 * shape.groups), shape.groups
        width, size = self.small(shape.head_width, 16), self.small(shape.state_width, 16)
        return SsdCase(lengths, heads, groups, width, size, marks, fresh).inputs(self.dtype, device)

    def arguments(self, job: Job) -> list[Any]:
        if self.device.type == "meta":
            return [moved(self.inputs(job, torch.device("cpu")), self.device)]
        given = self.inputs(job, self.device)
        nbytes = sum(x.nbytes for x in (*vars(given[0]).values(), given[1]) if isinstance(x, Tensor))
        return [given, *(moved_states(given) for _ in range(min(8, self.turns(nbytes)) - 1))]

    def launch(self, job: Job, arguments: Any) -> Any:
        """Return the outputs, and the states if results are compared, which are then not replaced."""
        given = moved_states(arguments) if self._compared else arguments
        is_scan = SHAPES[job.case].heads == 0
        if job.cut == "vllm":
            return self._vllm(job, given)
        if job.cut == "walked":
            y = selective_scan_in_order(*given) if is_scan else ssd_in_order(*given)
        else:
            op: Callable[..., Tensor] = selective_scan if is_scan else ssd
            y = op(*given, cut=job.cut)
        return (y, states_of(given)) if self._compared else y

    def reference(self, job: Job, arguments: Any) -> Any:
        given = moved_states(arguments)
        if SHAPES[job.case].heads == 0:
            y = (scan_torch.selective_scan if job.timed else scan_op.selective_scan)(*given)
        else:
            y = (ssd_torch.ssd if job.timed else ssd_op.ssd)(*given)
        return y, states_of(given)

    def check(self, job: Job, arguments: Any) -> float | None:
        self._compared = True
        try:
            return super().check(job, arguments)
        finally:
            self._compared = False

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return self.error_of_sums(got, want[: len(got)])

    def time(self, job: Job, calls: list[Any], least: float) -> float:
        """Time it on copies of the states, which every launch replaces."""
        return super().time(job, [moved_states(given) for given in calls], least)

    def interpreted(self, job: Job) -> Any:
        return (job.case, job.op) if job.cut != "vllm" and job.op in ("check", "step") else None

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        shape, lengths = SHAPES[job.case], lengths_of(job.op, job.tokens)
        tokens, rows = sum(lengths), len(lengths)
        if shape.heads == 0:
            channels, size = shape.head_width, shape.state_width
            cost = selective_scan_cost(tokens, rows, channels=channels, state_width=size, itemsize=2)
            seconds = max(cost.bytes / self.bandwidth, tokens * channels * size / EXPONENTIALS)
            return Limit(seconds, cost.flops)
        cost = ssd_cost(
            tokens, rows, heads=shape.heads, groups=shape.groups, head_width=shape.head_width,
            state_width=shape.state_width, itemsize=2,
        )  # fmt: skip
        return self.least(cost.bytes, cost.flops, note=f"{cost.bytes / 1e6:.0f} MB")

    # vLLM

    def _vllm(self, job: Job, given: tuple[Any, ...]) -> Any:
        """Raises AssertionError if vLLM has no such function, or it fails."""
        try:
            scan = SHAPES[job.case].heads == 0
            if job.op == "step":
                return self._vllm_step(given, scan)
            if scan:
                return self._vllm_scan(job, given)
            y, states = self._vllm_chunks(job, given)
            return (y, states) if self._compared else y
        except (ImportError, TypeError, ValueError, RuntimeError) as error:
            raise AssertionError(f"vllm: {type(error).__name__}: {error}"[:300]) from error

    def _vllm_chunks(self, job: Job, given: tuple[Any, ...]) -> Any:
        from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen as chunk_scan
        from vllm.v1.attention.backends.mamba2_attn import compute_varlen_chunk_metadata

        x, states_NHPS, turns = given
        make = partial(compute_varlen_chunk_metadata, turns.start_R1, VLLM_CHUNK)
        ends, last_R, row_C = self.kept("vllm chunks", job.setting, make)
        before_RHPS = self.kept("vllm states", job.setting, lambda: states_NHPS[turns.reads_R])
        y_THP = torch.empty(x.x_THP.shape, dtype=x.x_THP.dtype, device=x.x_THP.device)
        after_RHPS = chunk_scan(
            x.x_THP, x.dt_TH, x.rate_H, x.b_TGS, x.c_TGS, VLLM_CHUNK, cu_seqlens=turns.start_R1,
            cu_chunk_seqlens=ends, last_chunk_indices=last_R, seq_idx=row_C, out=y_THP, D=x.skip_H,
            dt_bias=x.dt_bias_H, initial_states=before_RHPS, dt_softplus=True, dt_limit=(x.dt_min, x.dt_max),
            state_dtype=torch.float32,
        )  # fmt: skip
        return y_THP, after_RHPS

    def _vllm_scan(self, job: Job, given: tuple[Any, ...]) -> Tensor:
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn

        x, states_NXS, turns = given
        make = lambda: [v_T.T.contiguous() for v_T in x.by_token.values()]  # noqa: E731
        x_XT, dt_XT, b_ST, c_ST, z_XT = make() if self._compared else self.kept("vllm inputs", job.setting, make)
        y_XT = selective_scan_fn(
            x_XT, states_NXS, dt_XT, x.rate_XS, b_ST[None], c_ST[None], x.skip_X, z_XT, x.dt_bias_X, True,
            query_start_loc=turns.start_R1, cache_indices=turns.reads_R.int(), has_initial_state=~turns.fresh_R,
        )  # fmt: skip
        return y_XT.T

    def _vllm_step(self, given: tuple[Any, ...], scan: bool) -> Any:
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        own, states, turns = given
        if scan:
            x, dt, rate, b, c, skip, bias, z = vars(own).values()
        else:
            x, dt, rate, b, c, skip, bias, _, _ = vars(own).values()
            width, size = states.shape[2:]
            dt, skip, bias = (v[..., None].expand(*v.shape, width) for v in (dt, skip, bias))
            rate, z = rate[:, None, None].expand(-1, width, size), None
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        places = self.kept("vllm places", id(turns), lambda: (turns.reads_R.int(), turns.writes_R.int()))
        selective_state_update(
            states, x, dt, rate, b, c, skip, bias, z=z, dt_softplus=True, state_batch_indices=places[0],
            dst_state_batch_indices=places[1], out=y,
        )  # fmt: skip
        return (y, states_of(given)) if self._compared else y


def moved_states(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same arguments with a copy of the states."""
    inputs, states, turns = given
    return inputs, states.clone(), turns


def states_of(given: tuple[Any, ...]) -> Tensor:
    """Return the states that a step has written, and behind them those at marks."""
    _, states, turns = given
    marked_R = turns.marked_R[turns.marks_R > 0] if turns.marks_R.any() else turns.marked_R[:0]
    return states[torch.cat((turns.writes_R[turns.writes_R > 0], marked_R))]


if __name__ == "__main__":
    run(Scans)
