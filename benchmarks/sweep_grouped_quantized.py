"""Products of quantized experts on a GPU: check every cut against float32, then time them in captured graphs.

    python benchmarks/sweep_grouped_quantized.py --json results.jsonl [--model "gpt-oss-20b mxfp4"]

sweep_grouped.py is the same for plain matrices. A limit is the larger of (bytes of touched experts with their scales,
rows and results) / 4.42 TB/s and FLOPs / 750 TFLOP/s (twice that for FP8, although the kernels multiply in 16 bits).
Errors are relative to the outputs' norm. sweeping_runs.py says how it is done.

Legend: see kernels/grouped_gemm/op.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from benchmarks.sweep_grouped import routes_of, touched
from benchmarks.sweeping import Job, Limit, Sweep
from benchmarks.sweeping_runs import run
from ridgeline.core.weight_format import Fp8Format
from ridgeline.kernels.coded_gemm.op import MXFP4, W4
from ridgeline.kernels.grouped_gemm import hopper, op, triton
from ridgeline.kernels.grouped_gemm.choose import Rows, Tiles, Widened
from ridgeline.kernels.grouped_gemm.hopper_plans import Stream, widening
from ridgeline.kernels.grouped_gemm.matrices import Quantized, part, shape_of, stacked, turned

CHANNELS, BLOCKS = Fp8Format(activations=None), Fp8Format(block=True, activations=None)
TOKENS, CHECKED = (1, 4, 8, 64, 256, 1024, 8192), (3, 40, 700)


@dataclass(frozen=True)
class Model:
    """A mixture's shape in a format. layers: so many that their weights do not fit into the second-level cache."""

    case: op.Case
    layers: int


QWEN = op.Case(1, 2048, 768, experts=128, used=8)
GPT_OSS = op.Case(1, 2880, 2880, 32, 4, "swiglu_clamped", bias=True, format=MXFP4, scales=torch.uint8)
MODELS = {
    "gpt-oss-20b mxfp4": Model(GPT_OSS, 4),
    "qwen3-30b fp8-block": Model(replace(QWEN, format=BLOCKS), 4),
    "qwen3-30b fp8": Model(replace(QWEN, format=CHANNELS), 4),
    "mixtral w4": Model(op.Case(1, 4096, 14_336, 8, 2, format=W4), 2),
}


def plans(model: Model, what: str, tokens: int) -> list[Any]:
    """Return the cuts that may be the best for so many tokens; None is the one that is chosen by itself."""
    inputs = model.case.width if what == "gate_up" else model.case.inner
    average = tokens * model.case.used / model.case.experts
    found: list[Any] = [None]
    if tokens <= 4:
        blocks = (1024, 512) if inputs % 2048 else (2048, 1024)
        found += [Rows(rows, block, 4) for block in blocks for rows in (2, 4)]
    if average <= 256:
        block = 128 if inputs % 128 == 0 else 64
        found += [Tiles(64, 16, block, 4, 4)] if average <= 24 else []
        found += [Tiles(64, 64, block, 4, 3)] if average > 8 else []
        gated = what == "gate_up"
        cuts = [(64, 16, 8, 2), (64, 16, 8, 1), (128, 16, 8, 1)] if average <= 24 else []
        cuts += [(64, 64, 16, 2), (64, 64, 16, 1), (128, 64, 16, 1)] if average >= 4 else []
        found += [widening(rows, held, narrow, gated=gated, resident=some) for rows, held, narrow, some in cuts]
    return [*found, Widened()] if average >= 32 else found


class GroupedQuantized(Sweep):
    workload = "products of quantized experts"
    seconds, tolerance = 90.0, 0.012

    def jobs(self) -> list[Job]:
        return [
            Job(name, what, tokens, cut=cut, timed=timed)
            for name, model in MODELS.items()
            for timed in (False, True)
            for tokens in (TOKENS if timed else CHECKED)
            for what in ("gate_up", "down")
            for cut in plans(model, what, tokens)
        ]

    def shape(self, job: Job) -> op.Case:
        case = MODELS[job.case].case
        width, inner, experts = self.small(case.width, 128), self.small(case.inner, 128), self.small(case.experts, 4)
        tokens, used = self.small(job.tokens, 3), min(case.used, self.small(case.experts, 2))
        skew = 0.0 if job.timed else 1.0
        return replace(case, tokens=tokens, width=width, inner=inner, experts=experts, used=used, skew=skew)

    def arguments(self, job: Job) -> list[Any]:
        """Return every layer's arguments of the op."""
        number = MODELS[job.case].layers if job.timed and self.device.type == "cuda" else 1
        return [self._layer(job, weight, seed) for seed, weight in enumerate(self._weights(job)[:number])]

    def _weights(self, job: Job) -> list[Quantized]:
        """Return every layer's matrices. They are copies: random codes take long."""
        case, number = self.shape(job), MODELS[job.case].layers if self.device.type == "cuda" else 1

        def make() -> dict[str, list[Quantized]]:
            first = {what: self._matrices(case, what) for what in ("gate_up", "down")}
            again = range(number - 1)
            return {what: [one, *(type(one)(*map(clone, one)) for _ in again)] for what, one in first.items()}

        return self.kept("weights", job.case, make)[job.op]

    def _matrices(self, case: op.Case, what: str) -> Quantized:
        """Return random matrices, made of a few experts."""
        few = replace(case, experts=4, used=1, tokens=1)
        if self.device.type == "meta":
            shape = (2 * case.inner, case.width) if what == "gate_up" else (case.width, case.inner)
            return self._without_memory(few, case.experts, *shape)
        made = few.gate_up_inputs if what == "gate_up" else few.down_inputs
        some = made(self.dtype, self.device)[1]
        return turned(stacked([part(some, expert % 4) for expert in range(case.experts)]))

    def _without_memory(self, case: op.Case, experts: int, outputs: int, inputs: int) -> Quantized:
        """Return the types of a small case's tensors, in the shapes of a large one."""
        small = replace(case, width=256, inner=128).gate_up_inputs(self.dtype, torch.device("cpu"))[1]
        blocks, group = getattr(case.format, "block", False), getattr(case.format, "group", 0) or inputs
        shapes = {
            "weight_OI": (outputs, inputs), "code_OB": (outputs, inputs // 2), "scale_OG": (outputs, inputs // group),
            "scale_SC": (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1), "scale": (),
        }  # fmt: skip
        fields = {
            name: torch.empty((experts, *shapes[name]), dtype=field.dtype, device=self.device)
            if isinstance(field, Tensor)
            else field
            for name, field in zip(small._fields, small, strict=True)
        }
        return turned(type(small)(**fields))

    def _layer(self, job: Job, weight: Quantized, seed: int) -> tuple[Any, ...]:
        case, gated = self.shape(job), job.op == "gate_up"
        _, outputs, inputs = shape_of(weight)
        x = self.normal(case.tokens if gated else case.tokens * case.used, inputs)
        bias = self.normal(case.experts, outputs) if case.bias else None
        last = case.gate if gated else self.normal(case.tokens, case.width)
        return x, weight, bias, routes_of(case, self.device, seed), last

    def launch(self, job: Job, arguments: Any) -> Tensor:
        if isinstance(job.cut, Stream):
            on_hopper = hopper.grouped_gate_up if job.op == "gate_up" else hopper.grouped_down
            return on_hopper(*arguments, job.cut)
        anywhere = triton.grouped_gate_up if job.op == "gate_up" else triton.grouped_down
        return anywhere(*arguments, plan=job.cut)

    def interpreted(self, job: Job) -> Any:
        return type(job.cut) if isinstance(job.cut, Tiles) else None

    def reference(self, job: Job, arguments: Any) -> Tensor | None:
        if job.timed:
            return None
        function = op.grouped_gate_up if job.op == "gate_up" else op.grouped_down
        return function(arguments[0].float(), *arguments[1:])

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return float((got[0].float() - want[0]).norm() / want[0].norm())

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        case, weight, reached = self.shape(job), calls[0][1], touched([one[3] for one in calls])
        experts, outputs, inputs = shape_of(weight)
        pairs = case.tokens * case.used
        moved = weight.nbytes * reached / experts + 2 * (case.tokens * case.width + pairs * case.inner)
        peak = self.peak * (2 if isinstance(case.format, Fp8Format) else 1)
        return self.least(moved, 2.0 * pairs * outputs * inputs, peak, f"{reached:.1f} experts")


def clone(field: Any) -> Any:
    return field.clone() if isinstance(field, Tensor) else field


if __name__ == "__main__":
    run(GroupedQuantized)
