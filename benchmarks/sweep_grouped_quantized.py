"""Products of quantized experts on a GPU: check every cut against float32, then time them in captured graphs.

    python benchmarks/sweep_grouped_quantized.py --compile-only        # needs no GPU
    python benchmarks/sweep_grouped_quantized.py --json results.json

sweep_grouped.py is the same for plain matrices, and says how its children work. A limit is the larger of (bytes of
touched experts with their scales, rows and results) / 4.42 TB/s and FLOPs / 750 TFLOP/s (twice that for FP8). Errors
are relative to the outputs' norm. Cuts of the portable kernels leave activations beside FP8 unrounded, those for Hopper
round them, and each is compared with the reference that does likewise. Times of FP8 include the rounding.

Legend: see kernels/grouped_gemm/op.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from sweep_grouped import FLOPS, RATE, one_child

from ridgeline.core.weight_format import Fp8Format, WeightFormat
from ridgeline.kernels.aot import compiling_for
from ridgeline.kernels.coded_gemm.op import MXFP4
from ridgeline.kernels.fp8_gemm.op import Fp8
from ridgeline.kernels.grouped_gemm import hopper, hopper_plans, op, triton
from ridgeline.kernels.grouped_gemm.choose import Rows, Tiles, Widened
from ridgeline.kernels.grouped_gemm.hopper_plans import Stream, coded, stream
from ridgeline.kernels.grouped_gemm.matrices import Matrices, part, shape_of, stacked
from ridgeline.kernels.grouped_gemm.packed import Packed, fits, packed
from ridgeline.kernels.launch import settle_cache_keys
from ridgeline.kernels.route.op import Routes

CHANNELS, BLOCKS = Fp8Format(), Fp8Format(block=True, activations="block")
TOKENS = (1, 8, 64, 256, 1024, 8192)
CHECKED = (3, 40, 700)


@dataclass(frozen=True)
class Model:
    """A mixture's shape in a format. layers: so many that their weights do not fit into the second-level cache."""

    case: op.Case
    layers: int

    def format(self) -> WeightFormat | None:
        return self.case.format


QWEN = op.Case(1, 2048, 768, experts=128, used=8)
MODELS = {
    "gpt-oss-20b mxfp4": Model(
        op.Case(1, 2880, 2880, 32, 4, "swiglu_clamped", bias=True, format=MXFP4, scales=torch.uint8), 4
    ),
    "qwen3-30b fp8-block": Model(replace(QWEN, format=BLOCKS), 4),
    "qwen3-30b fp8": Model(replace(QWEN, format=CHANNELS), 4),
    "qwen3-30b bf16": Model(QWEN, 3),
}
HopperTiles = hopper_plans.Tiles
KINDS: dict[str, Any] = {"Rows": Rows, "Tiles": Tiles, "Widened": Widened, "Stream": Stream, "HopperTiles": HopperTiles}


def plans(model: Model, what: str, tokens: int) -> list[Any]:
    """Return the cuts that may be the best for so many tokens; None is the one that is chosen by itself."""
    gated, inputs = what == "gate_up", model.case.width if what == "gate_up" else model.case.inner
    average = tokens * model.case.used / model.case.experts
    if model.format() is None:
        return [None]
    found: list[Any] = [None]
    if model.format() is MXFP4:
        cuts = [(64, 16, 8, 1), (128, 16, 8, 1)] if average <= 16 else []
        cuts += [(64, 32, 16, 2), (64, 64, 32, 1), (128, 64, 32, 1)] if 4 <= average <= 64 else []
        cuts += [(64, 128, 64, 1), (128, 64, 32, 1)] if average > 32 else []
        cuts = list(dict.fromkeys(cuts))
        found += [coded(rows, held, narrow, gated=gated, resident=some) for rows, held, narrow, some in cuts]
        return [*found, Widened()] if average >= 128 else found
    if tokens <= 8:
        found += [Rows(2, 1024 if inputs % 1024 == 0 else 256, 4)]
    if average <= 48:
        held = 16 if average <= 8 else 64
        blocks = (128, 256) if not gated else (128,)
        found += [
            stream(64, held, max(8, held // 4), block, inputs, gated=gated, resident=some, itemsize=1)
            for block in blocks
            for some in (1, 2)
        ]
    if average > 8:
        found += [HopperTiles(6, 128)] if model.format() is BLOCKS else [HopperTiles()]
    return found


def on_hopper(plan: Any) -> bool:
    """Return True for a cut of the kernels for Hopper."""
    return plan is None or plan[0] in ("Stream", "HopperTiles")


@dataclass(frozen=True)
class Job:
    """One check (`check`) or one timing of an op. plan: [kind, fields], or None."""

    model: str
    what: str  # "gate_up" or "down"
    tokens: int
    check: bool
    plan: Any = None


def jobs(names: list[str]) -> list[Job]:
    found = []
    for name in names:
        for check in (True, False):
            for tokens in CHECKED if check else TOKENS:
                for what in ("gate_up", "down"):
                    cuts = plans(MODELS[name], what, tokens)
                    told = [None if cut is None else [name_of(cut), asdict(cut)] for cut in cuts]
                    found += [Job(name, what, tokens, check, plan) for plan in told]
    return found


def name_of(cut: Any) -> str:
    return next(name for name, kind in KINDS.items() if type(cut) is kind)


def plan_of(told: Any) -> Any:
    return None if told is None else KINDS[told[0]](**told[1])


def run(what: str, plan: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Call the op. The matrices are in two orders, as they come and as Hopper wants them; a cut takes its own."""
    x, weights, *rest = arguments
    given = (x, weights[on_hopper(plan)], *rest)
    if plan is not None and on_hopper(plan):
        return (hopper.grouped_gate_up if what == "gate_up" else hopper.grouped_down)(*given, plan_of(plan))
    return (triton.grouped_gate_up if what == "gate_up" else triton.grouped_down)(*given, plan=plan_of(plan))


def ordered(weight: Matrices) -> Matrices:
    """Return the matrices as Hopper wants them."""
    return packed(weight) if not isinstance(weight, torch.Tensor | Fp8) and fits(weight) else weight


def compile_one(job: Job) -> tuple[str, str]:
    """Compile what a job launches, on tensors that have no memory."""
    settle_cache_keys()
    try:
        with compiling_for("sm_90", 132):
            run(job.what, job.plan, on_meta(job))
    except Exception as error:
        return str(job), f"{type(error).__name__}: {error}"[:1000]
    return str(job), ""


def on_meta(job: Job) -> tuple[Any, ...]:
    case, meta = replace(MODELS[job.model].case, tokens=job.tokens), torch.device("meta")
    pairs, gated = case.tokens * case.used, job.what == "gate_up"
    outputs, inputs = (2 * case.inner, case.width) if gated else (case.width, case.inner)
    small = replace(case, tokens=1, width=256, inner=128, experts=1, used=1).gate_up_inputs(
        torch.bfloat16, torch.device("cpu")
    )[1]
    shapes = {
        "weight_OI": (outputs, inputs), "code_OB": (outputs, inputs // 2),
        "scale_OG": (outputs, inputs // (getattr(case.format, "group", 0) or inputs)),
        "scale_SC": (-(-outputs // 128), -(-inputs // 128)) if getattr(case.format, "block", False) else (outputs, 1),
        "scale": (),
    }  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    if isinstance(small, torch.Tensor):
        weights = (empty(case.experts, outputs, inputs),) * 2
    else:
        fields = {
            name: empty(case.experts, *shapes[name], dtype=field.dtype) if isinstance(field, torch.Tensor) else field
            for name, field in zip(small._fields, small, strict=True)
        }
        plain = type(small)(**fields)
        weights = (plain, Packed(*plain) if case.format is MXFP4 else plain)
    int32 = torch.int32
    routes = Routes(
        empty(case.tokens, case.used, dtype=int32), empty(case.tokens, case.used, dtype=torch.float32),
        empty(pairs, dtype=int32), empty(case.tokens, case.used, dtype=int32), empty(case.experts + 1, dtype=int32),
    )  # fmt: skip
    bias = empty(case.experts, outputs) if case.bias else None
    x = empty(case.tokens if gated else pairs, inputs)
    return (x, weights, bias, routes, case.gate if gated else empty(case.tokens, case.width))


class Bench:
    """Layers of one model at a time, on the GPU."""

    def __init__(self) -> None:
        self.device, self.model = torch.device("cuda"), ""
        self.weights: dict[str, list[tuple[Matrices, Matrices]]] = {}
        self.made: tuple[Any, ...] = ()
        self.given: list[tuple[Any, ...]] = []
        self.expected: dict[bool, torch.Tensor] = {}

    def arguments(self, job: Job) -> list[tuple[Any, ...]]:
        """Return every layer's arguments of the op."""
        model = MODELS[job.model]
        if self.model != job.model:
            self.weights, self.given, self.made, self.model = {}, [], (), job.model
            torch.cuda.empty_cache()
            self.weights = {what: [self._matrices(model, what)] for what in ("gate_up", "down")}
            for some in self.weights.values():  # copies: random codes take long
                plain, ours = some[0]
                for one in [copied(ours) for _ in range(model.layers - 1)]:
                    some.append((one if plain is ours else plain, one))
        made = (job.what, job.tokens, job.check)
        if self.made != made:
            self.given = [self._layer(model, job, seed) for seed in range(model.layers if not job.check else 1)]
            self.made, self.expected = made, {}
        return self.given

    def _matrices(self, model: Model, what: str) -> tuple[Matrices, Matrices]:
        """Return random matrices in both orders, made of a few experts."""
        case = replace(model.case, experts=4, used=1)
        made = case.gate_up_inputs if what == "gate_up" else case.down_inputs
        few = made(torch.bfloat16, self.device)[1]
        if isinstance(few, torch.Tensor):
            return (few.repeat(model.case.experts // 4, 1, 1),) * 2
        plain = stacked([part(few, expert % 4) for expert in range(model.case.experts)])
        return plain, ordered(plain)

    def _layer(self, model: Model, job: Job, seed: int) -> tuple[Any, ...]:
        case = replace(model.case, tokens=job.tokens, skew=1.0 if job.check else 0.0)
        weights, gated = self.weights[job.what][seed], job.what == "gate_up"
        _, outputs, inputs = shape_of(weights[0])

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device).bfloat16()

        x = normal(job.tokens if gated else job.tokens * case.used, inputs)
        bias = normal(case.experts, outputs) if case.bias else None
        return x, weights, bias, case.routes(self.device, seed), case.gate if gated else normal(job.tokens, case.width)

    def check(self, job: Job) -> dict[str, Any]:
        """Compare with the reference in float32, and a second launch with the first. Rows of nobody are left out."""
        given = self.arguments(job)[0]
        reference = op.grouped_gate_up if job.what == "gate_up" else op.grouped_down
        first, second = (run(job.what, job.plan, given).float() for _ in range(2))
        rounds = on_hopper(job.plan)
        if rounds not in self.expected:
            weight = given[1][0]
            if not rounds and isinstance(weight, Fp8):
                weight = weight._replace(format=replace(weight.format, activations=None))
            self.expected[rounds] = reference(given[0].float(), weight, *given[2:])
        expected = self.expected[rounds]
        assert torch.equal(first, second), "two launches differ"
        error = ((first - expected).norm() / expected.norm()).item()
        assert error < 0.012, f"error {error}"  # NaN too
        return {"error": error}

    def time(self, job: Job) -> dict[str, Any]:
        """Return microseconds a call, and the limit."""
        given = self.arguments(job)
        touched = sum(int((one[3].start_E1.diff() > 0).sum()) for one in given) / len(given)
        seconds, flops = limit(MODELS[job.model], job.what, job.tokens, touched, given[0][1][0])
        calls = len(given) * max(1, round(1e-3 / (seconds * len(given))))
        run(job.what, job.plan, given[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(job.what, job.plan, given[i % len(given)])
        graph.replay()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(3):
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e3 / (2 * calls))
        return {"us": best, "limit_us": seconds * 1e6, "touched": touched, "flops": flops}


def copied(weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    return type(weight)(*(field.clone() if isinstance(field, torch.Tensor) else field for field in weight))


def limit(model: Model, what: str, tokens: int, touched: float, weight: Matrices) -> tuple[float, float]:
    """Return (the least seconds of a call, FLOPs)."""
    case, pairs = model.case, tokens * model.case.used
    experts, outputs, inputs = shape_of(weight)
    rows = 2 * (tokens * case.width + pairs * case.inner)
    flops = 2.0 * pairs * outputs * inputs
    rate = FLOPS * (2 if isinstance(model.format(), Fp8Format) else 1)
    return max((weight.nbytes * touched / experts + rows) / RATE, flops / rate), flops


def child(path: str) -> None:
    """Do the jobs of a file, and print a line for each."""
    torch.manual_seed(0)
    bench = Bench()
    for number, fields in json.loads(Path(path).read_text()):
        job, broken = Job(**fields), False
        try:
            answer = bench.check(job) if job.check else bench.time(job)
        except AssertionError as error:
            answer = {"failed": str(error)}
        except Exception as error:
            answer, broken = {"failed": f"{type(error).__name__}: {error}"[:600], "broken": True}, True
        print(json.dumps({"number": number, **answer}), flush=True)
        if broken:
            sys.exit(1)  # after an error on the device nothing works


def work(found: list[Job], path: Path, until: float) -> dict[int, dict[str, Any]]:
    """Have all jobs done by children, and return their answers. Cuts that broke are not launched again."""
    answers: dict[int, dict[str, Any]] = {}
    pending = dict(enumerate(found))
    while pending and time.monotonic() < until:
        path.write_text(json.dumps([(number, asdict(job)) for number, job in pending.items()]))
        for answer in one_child(path, len(pending), until, __file__):
            number = answer.pop("number", next(iter(pending)))
            job, answers[number] = pending.pop(number), answer
            if "failed" in answer:
                print(f"FAILED {job}: {answer['failed']}", flush=True)
            if "broken" in answer:
                pending = {i: one for i, one in pending.items() if (one.what, one.plan) != (job.what, job.plan)}
    return answers


def show(found: list[Job], answers: dict[int, dict[str, Any]]) -> None:
    """Print the checks' worst error, then each case's times, the fastest first."""
    done = [(found[number], answer) for number, answer in answers.items() if "failed" not in answer]
    errors = [answer["error"] for job, answer in done if job.check]
    print(f"{len(errors)} of {sum(job.check for job in found)} checks passed, worst error {max(errors, default=0):.4f}")
    cases: dict[tuple[str, int, str], list[tuple[float, Job, dict[str, Any]]]] = {}
    for job, answer in done:
        if not job.check:
            cases.setdefault((job.model, job.tokens, job.what), []).append((answer["us"], job, answer))
    for (model, tokens, what), rows in cases.items():
        rows.sort(key=lambda row: row[0])
        us, _, answer = rows[0]
        others = "  ".join(f"{short(job.plan)} {us:.1f}" for us, job, _ in rows)
        print(
            f"{model:20s} T {tokens:4d} {what:7s} {us:7.1f} µs {100 * answer['limit_us'] / us:5.1f} % "
            f"{answer['flops'] / us / 1e6:4.0f} TFLOP/s {answer['touched']:5.1f} experts | {others}"
        )


def short(plan: Any) -> str:
    return "chosen" if plan is None else plan[0].lower() + "/".join(str(value) for value in plan[1].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--seconds", type=float, default=60, help="stop by then")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--compile-only", action="store_true", help="compile all kernels, which needs no GPU, and end")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        settle_cache_keys()
        child(arguments.child)
        return
    started = time.monotonic()
    found = jobs(arguments.model or list(MODELS))
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        unlike = {(job.model, job.what, str(job.plan or job.tokens)): job for job in found}
        compiled = list(pool.map(compile_one, unlike.values(), chunksize=1))
    for name, error in compiled:
        if error:
            print(f"NOT COMPILED {name}: {error}")
    print(f"{len(compiled)} launches compiled in {time.monotonic() - started:.0f} s", flush=True)
    if arguments.compile_only:
        return
    answers = work(found, Path("/tmp/sweep_grouped_quantized_jobs.json"), started + arguments.seconds)
    show(found, answers)
    print(f"{len(answers)} of {len(found)} jobs in {time.monotonic() - started:.0f} s")
    if arguments.json:
        rows = [asdict(found[number]) | answer for number, answer in answers.items()]
        arguments.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
