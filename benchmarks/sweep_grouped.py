"""Experts' products on a Hopper GPU: check every cut of the kernels against float32, then time them.

    python benchmarks/sweep_grouped.py --json results.json

Kernels are compiled first, in many processes. One child then checks and times. If it says nothing for 20 seconds, or
fails, it is ended, what it was doing is noted, and another one goes on behind that. Times are of CUDA graphs whose
launches take several layers' weights in turn, so that no weights are found in the second-level cache. A limit is the
larger of (bytes of touched experts, rows and results) / 4.42 TB/s and FLOPs / 750 TFLOP/s.

Legend: see kernels/grouped_gemm/op.py
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from ridgeline.kernels.aot import compiling_for
from ridgeline.kernels.grouped_gemm import hopper, op
from ridgeline.kernels.grouped_gemm.hopper_plans import Stream, Tiles, stream
from ridgeline.kernels.launch import settle_cache_keys
from ridgeline.kernels.route.op import Routes

RATE, FLOPS = 4.42e12, 750e12
SILENCE = 20.0  # seconds after which a child is taken for hung
START = 60.0  # likewise for its first answer


@dataclass(frozen=True)
class Model:
    """A mixture's shape, and the numbers of tokens to time."""

    width: int
    inner: int
    experts: int
    used: int
    gate: str
    bias: bool
    layers: int
    times: tuple[int, ...]
    checks: tuple[tuple[int, float, int], ...] = ((5, 0.0, 2), (40, 3.0, 3), (333, 1.0, 13))  # tokens, skew, dead

    def case(self, tokens: int, skew: float = 0.0, dead: int = 0) -> op.Case:
        return op.Case(
            tokens,
            self.width,
            self.inner,
            self.experts,
            self.used,
            self.gate,
            self.bias,
            add=True,
            skew=skew,
            dead=dead,
        )

    def inputs(self, what: str) -> int:
        return self.width if what == "gate_up" else self.inner

    def plans(self, what: str) -> list[Stream | Tiles]:
        """Return the cuts to check."""
        gated, inputs = what == "gate_up", self.inputs(what)
        block = 64 if gated else 128
        cuts = [(64, 16, 8, block, 1), (64, 32, 8, block, 1), (64, 64, 16, block, 1), (64, 128, 32, block, 1)]
        cuts += [(64, 16, 8, block, 2), (64, 32, 16, block, 2), (128, 16, 8, 64, 1), (128, 64, 16, 64, 1)]
        found: list[Stream | Tiles] = [
            stream(rows, tokens, narrow, block, inputs, gated=gated, resident=resident)
            for rows, tokens, narrow, block, resident in cuts
        ]
        return [*found, Tiles()]

    def worth(self, plan: Stream | Tiles, tokens: int) -> bool:
        """Return True if a cut may be the best for so many tokens."""
        average = tokens * self.used / self.experts
        if isinstance(plan, Tiles):
            return average >= 24
        return average / 4 <= plan.tokens <= max(32, 8 * average) and average <= 130


MODELS = {
    "qwen3-30b-a3b": Model(2048, 768, 128, 8, "silu", False, 4, (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)),
    "gpt-oss-20b": Model(2880, 2880, 32, 4, "swiglu_clamped", True, 2, (2, 8, 64, 256, 1024, 8192)),
    "mixtral-8x7b": Model(4096, 14336, 8, 2, "silu", False, 1, (8, 64, 1024, 8192)),
}


@dataclass(frozen=True)
class Job:
    """One check (`tokens` 0) or one timing. plan: None for the one that is chosen by itself."""

    model: str
    what: str  # "gate_up", "down", "layer" or "dense"
    tokens: int
    plan: dict[str, Any] | None = field(default=None)


def plan_of(fields: dict[str, Any] | None) -> Stream | Tiles | None:
    if fields is None:
        return None
    return Stream(**fields) if "rows" in fields else Tiles(**fields)


def jobs(models: list[str]) -> list[Job]:
    found = []
    for name in models:
        model = MODELS[name]
        both = [(what, plan) for what in ("gate_up", "down") for plan in model.plans(what)]
        found += [Job(name, what, 0, asdict(plan)) for what, plan in both] + [Job(name, "layer", 0)]
        for tokens in model.times:
            found += [Job(name, what, tokens, asdict(plan)) for what, plan in both if model.worth(plan, tokens)]
            found += [Job(name, "layer", tokens)]
            found += [Job(name, "dense", tokens)] if tokens == 8192 else []
    return found


# Compilation


def compile_one(job: Job) -> tuple[str, float, str]:
    """Compile what a job launches, on tensors that have no memory."""
    settle_cache_keys()
    started, model, meta = time.monotonic(), MODELS[job.model], torch.device("meta")
    name = f"{job.model} {job.what} {job.plan}"
    tokens = job.tokens or 64
    pairs = tokens * model.used

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    routes = Routes(
        empty(tokens, model.used, dtype=torch.int32),
        empty(tokens, model.used, dtype=torch.float32),
        empty(pairs, dtype=torch.int32),
        empty(tokens, model.used, dtype=torch.int32),
        empty(model.experts + 1, dtype=torch.int32),
    )
    try:
        with compiling_for("sm_90", 132):
            run(job.what, model, plan_of(job.plan), (
                empty(tokens, model.width), empty(pairs, model.inner),
                empty(model.experts, 2 * model.inner, model.width), empty(model.experts, model.width, model.inner),
                empty(model.experts, 2 * model.inner) if model.bias else None,
                empty(model.experts, model.width) if model.bias else None, routes, empty(tokens, model.width),
            ))  # fmt: skip
    except Exception as error:
        return name, time.monotonic() - started, f"{type(error).__name__}: {error}"[:2000]
    return name, time.monotonic() - started, ""


def run(what: str, model: Model, plan: Stream | Tiles | None, given: tuple[Any, ...]) -> torch.Tensor:
    """Launch one op, or both."""
    x_TM, h_PF, up_EGM, down_EMF, bias_EG, bias_EM, routes, add_TM = given
    if what == "dense":
        return torch.nn.functional.linear(x_TM.repeat(model.used, 1), up_EGM[0])
    if what in ("gate_up", "layer"):
        h_PF = hopper.grouped_gate_up(x_TM, up_EGM, bias_EG, routes, model.gate, plan if what == "gate_up" else None)
    if what in ("down", "layer"):
        return hopper.grouped_down(h_PF, down_EMF, bias_EM, routes, add_TM, plan if what == "down" else None)
    return h_PF


# The child


class Bench:
    """Layers of one model at a time, on the GPU."""

    def __init__(self) -> None:
        self.device, self.model = torch.device("cuda"), ""
        self.weights: list[tuple[Any, ...]] = []
        self.given: tuple[int, list[tuple[Any, ...]]] = (0, [])

    def load(self, name: str) -> Model:
        model = MODELS[name]
        if self.model != name:
            self.weights, self.given, self.model = [], (0, []), name
            torch.cuda.empty_cache()
            self.weights = [self._layer(model) for _ in range(model.layers)]
        return model

    def _layer(self, model: Model) -> tuple[Any, ...]:
        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, scale)

        return (
            normal(model.experts, 2 * model.inner, model.width, scale=model.width**-0.5),
            normal(model.experts, model.width, model.inner, scale=model.inner**-0.5),
            normal(model.experts, 2 * model.inner) if model.bias else None,
            normal(model.experts, model.width) if model.bias else None,
        )

    def inputs(self, model: Model, case: op.Case) -> list[tuple[Any, ...]]:
        """Return every layer's arguments. Tokens that go nowhere, and their pairs' rows, hold NaN."""
        found = []
        for seed, weights in enumerate(self.weights):
            routes = case.routes(self.device, seed)
            x_TM = torch.randn(case.tokens, model.width, device=self.device).bfloat16()
            h_PF = torch.randn(case.tokens * model.used, model.inner, device=self.device).bfloat16()
            x_TM[case.tokens - case.dead :] = torch.nan
            h_PF[(case.tokens - case.dead) * model.used :] = torch.nan
            found.append((x_TM, h_PF, *weights, routes, torch.randn_like(x_TM.nan_to_num())))
        return found

    def check(self, job: Job) -> dict[str, Any]:
        """Compare with the reference, and a second launch with the first."""
        model, plan, worst = self.load(job.model), plan_of(job.plan), 0.0
        for tokens, skew, dead in model.checks:
            case = model.case(tokens, skew, dead)
            x_TM, h_PF, up_EGM, down_EMF, bias_EG, bias_EM, routes, add_TM = given = self.inputs(model, case)[0]
            if job.what != "down":
                h_PF = expected = op.grouped_gate_up(x_TM, up_EGM, bias_EG, routes, model.gate)
            if job.what != "gate_up":
                expected = op.grouped_down(h_PF, down_EMF, bias_EM, routes, add_TM)
            kept = slice(0, int(routes.start_E1[-1])) if job.what == "gate_up" else slice(None)
            empty, torch.empty = torch.empty, spoiled  # type: ignore[assignment]
            try:
                first, second = (run(job.what, model, plan, given)[kept].float() for _ in range(2))
            finally:
                torch.empty = empty  # type: ignore[assignment]
            assert torch.equal(first, second), f"{tokens} tokens: two launches differ"
            error = ((first - expected[kept].float()).abs() / (1 + expected[kept].float().abs())).max().item()
            assert error < 0.03, f"{tokens} tokens: error {error}"  # NaN too
            worst = max(worst, error)
        return {"error": worst}

    def time(self, job: Job) -> dict[str, Any]:
        """Return microseconds a call, and the limit."""
        model, plan = self.load(job.model), plan_of(job.plan)
        if self.given[0] != job.tokens:
            self.given = (job.tokens, self.inputs(model, model.case(job.tokens)))
        given = self.given[1]
        touched = sum(int((one[6].start_E1.diff() > 0).sum()) for one in given) / len(given)
        seconds, flops = limit(job.what, model, job.tokens, touched)
        calls = len(given) * max(1, round(1e-3 / (seconds * len(given))))
        if job.what == "dense":
            wide = given[0][0].repeat(model.used, 1)
            call = lambda one: torch.nn.functional.linear(wide, one[2][0])  # noqa: E731
        else:
            call = lambda one: run(job.what, model, plan, one)  # noqa: E731
        call(given[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(given[i % len(given)])
        graph.replay()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(3):
            replays = max(1, round(8e-3 / (seconds * calls)))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e3 / (replays * calls))
        return {"us": best, "limit_us": seconds * 1e6, "touched": touched, "flops": flops, "calls": calls}


def spoiled(*shape: Any, **options: Any) -> torch.Tensor:
    """Return memory that shows what a kernel leaves unwritten."""
    return torch.full(shape, torch.nan, **options)


def limit(what: str, model: Model, tokens: int, touched: float) -> tuple[float, float]:
    """Return (the least seconds of a call, FLOPs). A layer's limit is the sum of its products' limits."""
    pairs = tokens * model.used
    up = (touched * 2 * model.inner * model.width + tokens * model.width + pairs * model.inner) * 2
    down = (touched * model.inner * model.width + pairs * model.inner + tokens * model.width) * 2
    flops = 2.0 * pairs * model.inner * model.width
    seconds = {"gate_up": max(up / RATE, 2 * flops / FLOPS), "down": max(down / RATE, flops / FLOPS)}
    seconds |= {"layer": seconds["gate_up"] + seconds["down"], "dense": 2 * flops / FLOPS}
    return seconds[what], {"gate_up": 2, "down": 1, "layer": 3, "dense": 2}[what] * flops


def child(path: str) -> None:
    """Do the jobs of a file, and print a line for each."""
    torch.manual_seed(0)
    bench = Bench()
    for number, fields in json.loads(Path(path).read_text()):
        job, broken = Job(**fields), False
        try:
            answer = bench.time(job) if job.tokens else bench.check(job)
        except AssertionError as error:
            answer = {"failed": str(error)}
        except Exception as error:
            answer, broken = {"failed": f"{type(error).__name__}: {error}"[:600], "broken": True}, True
        print(json.dumps({"number": number, **answer}), flush=True)
        if broken:
            sys.exit(1)  # after an error on the device nothing works


# The parent


def work(found: list[Job], path: Path, until: float) -> dict[int, dict[str, Any]]:
    """Have all jobs done by children, one after the other, and return their answers. What a hung or broken job
    launched is not launched again."""
    answers: dict[int, dict[str, Any]] = {}
    pending = dict(enumerate(found))
    while pending and time.monotonic() < until:
        path.write_text(json.dumps([(number, asdict(job)) for number, job in pending.items()]))
        for answer in one_child(path, len(pending), until):
            number = answer.pop("number", next(iter(pending)))
            job, answers[number] = pending.pop(number), answer
            if "failed" in answer:
                print(f"FAILED {job}: {answer['failed']}", flush=True)
            if "broken" in answer:
                pending = {i: other for i, other in pending.items() if not alike(job, other)}
    return answers


def alike(a: Job, b: Job) -> bool:
    """Return True if two jobs launch the same cut, of any model."""
    if a.plan is None or b.plan is None or a.what != b.what:
        return False
    return {**a.plan, "stages": 0} == {**b.plan, "stages": 0}


def one_child(path: Path, number: int, until: float, program: str = __file__) -> Iterator[dict[str, Any]]:
    """Yield the answers of a child. The last one has no number if the child hung or died over the next job."""
    command = [sys.executable, "-W", "ignore", program, "--child", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = selectors.DefaultSelector()
        reader.register(process.stdout, selectors.EVENT_READ)
        rest, patience = b"", START
        while number and time.monotonic() < until:
            if not reader.select(patience):
                yield {"failed": f"no answer in {patience:.0f} s", "broken": True}
                break
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                yield {"failed": "the child died", "broken": True}
                break
            *lines, rest = (rest + data).split(b"\n")
            patience = SILENCE
            for line in lines:
                answer = json.loads(line)
                number -= 1
                yield answer
                if "broken" in answer:
                    number = 0
        process.kill()


def show(found: list[Job], answers: dict[int, dict[str, Any]]) -> None:
    """Print the checks' worst error, then the best plan of each case and the others behind it."""
    done = [(found[number], answer) for number, answer in answers.items() if "failed" not in answer]
    errors = [answer["error"] for job, answer in done if not job.tokens]
    checks = sum(not job.tokens for job in found)
    print(f"{len(errors)} of {checks} checks passed, worst error {max(errors, default=0):.4f}")
    cases: dict[tuple[str, int, str], list[tuple[float, Job, dict[str, Any]]]] = {}
    for job, answer in done:
        if job.tokens:
            cases.setdefault((job.model, job.tokens, job.what), []).append((answer["us"], job, answer))
    for (model, tokens, what), rows in cases.items():
        rows.sort(key=lambda row: row[0])
        us, job, answer = rows[0]
        rate = f"{answer['flops'] / us / 1e6:6.0f} TFLOP/s"
        others = "  ".join(f"{short(job.plan)} {us:.1f}" for us, job, _ in rows[1:])
        print(
            f"{model:14s} T {tokens:5d} {what:8s} {us:8.1f} µs {100 * answer['limit_us'] / us:5.1f} % of limit {rate} "
            f"{answer['touched']:5.1f} experts  {short(job.plan)} | {others}"
        )


def short(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return "chosen"
    if "rows" not in plan:
        return f"tiles/{plan['stages']}"
    return f"{plan['rows']}x{plan['tokens']}({plan['narrow']})b{plan['block']}s{plan['stages']}r{plan['resident']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--seconds", type=float, default=100, help="stop by then")
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
    kernels = {(job.model, job.what, str(job.plan or job.tokens)): job for job in found if job.what != "dense"}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        compiled = list(pool.map(compile_one, kernels.values()))
    for name, _, error in compiled:
        if error:
            print(f"NOT COMPILED {name}: {error}")
    print(f"{len(compiled)} launches compiled in {time.monotonic() - started:.0f} s", flush=True)
    if arguments.compile_only:
        return
    path = Path("/tmp/sweep_grouped_jobs.json")
    answers = work(found, path, started + arguments.seconds)
    show(found, answers)
    print(f"{len(answers)} of {len(found)} jobs in {time.monotonic() - started:.0f} s")
    if arguments.json:
        rows = [asdict(found[number]) | answer for number, answer in answers.items()]
        arguments.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
