"""Products of quantized experts on a GPU: check every cut against float32, then time them in captured graphs.

    ridgeline bench sweep grouped_quantized --json results.jsonl [--case "gpt-oss-20b mxfp4"]

grouped.py is the same for plain matrices. A limit is the larger of (bytes of touched experts with their scales,
rows and results) / 4.42 TB/s and FLOPs / 750 TFLOP/s (twice that for FP8). Errors are relative to the outputs' norm.
Cuts of the portable kernels leave activations beside FP8 unrounded, those for Hopper round them, and each is compared
with the reference that does likewise. Times of FP8 include the rounding. runs.py says how it is done.

Legend: see kernels/gemm/experts/op.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.codes.op import MXFP4
from ridgeline.kernels.gemm.experts import hopper, hopper_plans, op, triton
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.choose import Rows, Tiles, Widened
from ridgeline.kernels.gemm.experts.hopper_plans import Stream, coded, stream
from ridgeline.kernels.gemm.experts.matrices import Matrices, part, shape_of, stacked
from ridgeline.kernels.gemm.experts.packed import Packed, fits, packed
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline_bench.sweep.grouped import routes_of, touched
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep

CHANNELS, BLOCKS = Fp8Format(), Fp8Format(block=True, activations="block")
TOKENS, CHECKED = (1, 8, 64, 256, 1024, 8192), (3, 40, 700)
HopperTiles = hopper_plans.Tiles


@dataclass(frozen=True)
class QuantizedMixture:
    """A mixture's shape in a format. layers: so many that their weights do not fit into the second-level cache."""

    case: ExpertsCase
    layers: int


QWEN = ExpertsCase(1, 2048, 768, experts=128, used=8)
GPT_OSS = ExpertsCase(1, 2880, 2880, 32, 4, "swiglu_clamped", bias=True, format=MXFP4, scales=torch.uint8)
MODELS = {
    "gpt-oss-20b mxfp4": QuantizedMixture(GPT_OSS, 4),
    "qwen3-30b fp8-block": QuantizedMixture(replace(QWEN, format=BLOCKS), 4),
    "qwen3-30b fp8": QuantizedMixture(replace(QWEN, format=CHANNELS), 4),
    "qwen3-30b bf16": QuantizedMixture(QWEN, 3),
}


def plans(model: QuantizedMixture, what: str, tokens: int) -> list[Any]:
    """Return the cuts that may be the best for so many tokens; None is the one that is chosen by itself."""
    form, gated, inputs = (
        model.case.format,
        what == "gate_up",
        model.case.width if what == "gate_up" else model.case.inner,
    )
    average = tokens * model.case.used / model.case.experts
    found: list[Any] = [None]
    if form is None:
        return found
    if form is MXFP4:
        cuts = [(64, 16, 8, 1), (128, 16, 8, 1)] if average <= 16 else []
        cuts += [(64, 32, 16, 2), (64, 64, 32, 1), (128, 64, 32, 1)] if 4 <= average <= 64 else []
        cuts += [(64, 128, 64, 1), (128, 64, 32, 1)] if average > 32 else []
        found += [coded(rows, held, narrow, gated=gated, resident=some) for rows, held, narrow, some in cuts]
        return [*found, Widened()] if average >= 128 else found
    if tokens <= 8:
        found += [Rows(2, 1024 if inputs % 1024 == 0 else 256, 4)]
    if average <= 48:
        held = 16 if average <= 8 else 64
        found += [
            stream(64, held, max(8, held // 4), block, inputs, gated=gated, resident=some, itemsize=1)
            for block in ((128,) if gated else (128, 256))
            for some in (1, 2)
        ]
    if average > 8:
        found += [HopperTiles(6, 128) if form is BLOCKS else HopperTiles()]
    return found


def on_hopper(cut: Any) -> bool:
    """Return True for a cut of the kernels for Hopper."""
    return cut is None or isinstance(cut, Stream | HopperTiles)


class GroupedQuantized(Sweep):
    workload = "products of quantized experts"
    seconds, tolerance = 60.0, 0.012

    def jobs(self) -> list[Job]:
        return [
            Job(name, what, tokens, cut=cut, timed=timed)
            for name, model in MODELS.items()
            for timed in (False, True)
            for tokens in (TOKENS if timed else CHECKED)
            for what in ("gate_up", "down")
            for cut in plans(model, what, tokens)
        ]

    def shape(self, job: Job) -> ExpertsCase:
        case = MODELS[job.case].case
        width, inner, experts = self.small(case.width, 128), self.small(case.inner, 128), self.small(case.experts, 4)
        tokens, used = self.small(job.tokens, 3), min(case.used, self.small(case.experts, 2))
        skew = 0.0 if job.timed else 1.0
        return replace(case, tokens=tokens, width=width, inner=inner, experts=experts, used=used, skew=skew)

    def arguments(self, job: Job) -> list[Any]:
        """Return every layer's arguments of the op."""
        number = MODELS[job.case].layers if job.timed and self.device.type == "cuda" else 1
        return [self._layer(job, weight, seed) for seed, weight in enumerate(self._weights(job)[:number])]

    def _weights(self, job: Job) -> list[tuple[Matrices, Matrices]]:
        """Return every layer's matrices as they come and as Hopper wants them. They are copies: random codes take
        long."""
        case, number = self.shape(job), MODELS[job.case].layers if self.device.type == "cuda" else 1

        def make() -> dict[str, list[tuple[Matrices, Matrices]]]:
            made = {}
            for what in ("gate_up", "down"):
                plain, ours = self._matrices(case, what)
                more = [copied(ours) for _ in range(number - 1)]
                made[what] = [(plain, ours), *((one if plain is ours else plain, one) for one in more)]
            return made

        return self.kept("weights", job.case, make)[job.op]

    def _matrices(self, case: ExpertsCase, what: str) -> tuple[Matrices, Matrices]:
        """Return random matrices in both orders, made of a few experts."""
        few = replace(case, experts=4, used=1, tokens=1)
        if self.device.type == "meta":
            shape = (2 * case.inner, case.width) if what == "gate_up" else (case.width, case.inner)
            return self._without_memory(few, case.experts, *shape)
        made = few.gate_up_inputs if what == "gate_up" else few.down_inputs
        some = made(self.dtype, self.device)[1]
        if isinstance(some, Tensor):
            return (some.repeat(case.experts // 4, 1, 1),) * 2
        plain = stacked([part(some, expert % 4) for expert in range(case.experts)])
        return plain, plain if isinstance(plain, Fp8) or not fits(plain) else packed(plain)

    def _without_memory(self, case: ExpertsCase, experts: int, outputs: int, inputs: int) -> tuple[Matrices, Matrices]:
        """Return the types of a small case's tensors, in the shapes of a large one."""
        small = replace(case, width=256, inner=128).gate_up_inputs(self.dtype, torch.device("cpu"))[1]
        if isinstance(small, Tensor):
            return (torch.empty((experts, outputs, inputs), dtype=self.dtype, device=self.device),) * 2
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
        plain = type(small)(**fields)
        return plain, Packed(*plain) if case.format is MXFP4 else plain

    def _layer(self, job: Job, weights: tuple[Matrices, Matrices], seed: int) -> tuple[Any, ...]:
        case, gated = self.shape(job), job.op == "gate_up"
        _, outputs, inputs = shape_of(weights[0])
        x = self.normal(case.tokens if gated else case.tokens * case.used, inputs)
        bias = self.normal(case.experts, outputs) if case.bias else None
        last = case.gate if gated else self.normal(case.tokens, case.width)
        return x, weights, bias, routes_of(case, self.device, seed), last

    def launch(self, job: Job, arguments: Any) -> Tensor:
        """Call the op. The matrices are in two orders, and a cut takes its own."""
        x, weights, *rest = arguments
        given: Any = (x, weights[on_hopper(job.cut)], *rest)
        if job.cut is not None and on_hopper(job.cut):
            here: Callable[..., Tensor] = hopper.grouped_gate_up if job.op == "gate_up" else hopper.grouped_down
            return here(*given, job.cut)
        anywhere: Callable[..., Tensor] = triton.grouped_gate_up if job.op == "gate_up" else triton.grouped_down
        return anywhere(*given, plan=job.cut)

    def interpreted(self, job: Job) -> Any:
        return type(job.cut) if isinstance(job.cut, Tiles) else None

    def reference(self, job: Job, arguments: Any) -> tuple[Tensor, Tensor] | None:
        """Return the results with activations as they are, and rounded as the weights' format says."""
        if job.timed:
            return None
        x, (weight, _), *rest = arguments
        function = op.grouped_gate_up if job.op == "gate_up" else op.grouped_down
        rounded = function(x.float(), weight, *rest)
        if not isinstance(weight, Fp8):
            return rounded, rounded
        return function(x.float(), weight._replace(format=replace(weight.format, activations=None)), *rest), rounded

    def defined(self, job: Job, arguments: Any, result: Any) -> Tensor:
        return result[on_hopper(job.cut)] if isinstance(result, tuple) else result

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return float((got[0].float() - want[0]).norm() / want[0].norm())

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        case, weight, reached = self.shape(job), calls[0][1][0], touched([one[3] for one in calls])
        experts, outputs, inputs = shape_of(weight)
        pairs = case.tokens * case.used
        moved = weight.nbytes * reached / experts + 2 * (case.tokens * case.width + pairs * case.inner)
        peak = self.peak * (2 if isinstance(case.format, Fp8Format) else 1)
        return self.least(moved, 2.0 * pairs * outputs * inputs, peak, f"{reached:.1f} experts")


def copied(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    return type(weight)(*(field.clone() if isinstance(field, Tensor) else field for field in weight))
