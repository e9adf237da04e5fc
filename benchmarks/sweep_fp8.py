"""Products with 8-bit weights on a Hopper GPU: check every cut of the kernels against float32, then time them.

    python benchmarks/sweep_fp8.py --json results.json

Kernels are compiled first, in many processes. One child then checks and times. If it says nothing for 15 seconds, or
fails, it is ended, what it was doing is noted, and another one goes on behind that. Times are of CUDA graphs whose
launches take several weights in turn, so that no weights are found in the second-level cache. "op" is all that an op
launches: rounding the activations (with norm and residual for qkv and gate_up) and the product. "product" is the
product alone. A limit is the larger of bytes / 4.42 TB/s and FLOPs / 1,979 TFLOP/s. Errors are the largest ones, in
standard deviations of the result.

Legend: see kernels/fp8_gemm/op.py
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from ridgeline.kernels.activation.op import gated_activation
from ridgeline.kernels.aot import compiling_for
from ridgeline.kernels.fp8_gemm import choose, library
from ridgeline.kernels.fp8_gemm.choose import Stream, Tiles
from ridgeline.kernels.fp8_gemm.eight import Eight
from ridgeline.kernels.fp8_gemm.products import rounded_linear
from ridgeline.kernels.fp8_gemm.rounded import Rounded, room
from ridgeline.kernels.fp8_gemm.rounding import round_into, round_rows
from ridgeline.kernels.gemm import triton as gemm
from ridgeline.kernels.launch import settle_cache_keys

RATE, FLOPS, PROCESSORS = 4.42e12, 1979e12, 132
SILENCE = 15.0  # seconds after which a child is taken for hung
START = 45.0  # likewise for its first answer
EPS = 1e-5
Plan = Stream | Tiles


@dataclass(frozen=True)
class Matrix:
    """A weight of `outputs` rows (of each half if gated). normed: its op has a norm and a residual."""

    outputs: int
    inputs: int
    gate: str | None = None
    normed: bool = False

    @property
    def rows(self) -> int:
        return self.outputs * (2 if self.gate else 1)


MATRICES = {
    "qkv": Matrix(6144, 4096, normed=True),
    "o": Matrix(4096, 4096),
    "gate_up": Matrix(14_336, 4096, "silu", normed=True),
    "down": Matrix(4096, 14_336),
    "large": Matrix(7168, 16_384),
}


@dataclass(frozen=True)
class Job:
    """One thing to check and time. plan: fields of a plan of ours; "library", "bf16" or "round" for others.

    form: "token" or "block" scales of E4M3, or "int8". "group": weights as "token"; o and down get activations that the
        op before has rounded, with a scale for each 128 (so the op is the product alone), and gate_up rounds its
        results in the same way.
    """

    matrix: str
    tokens: int
    what: str
    plan: dict[str, Any] | str
    form: str = "token"


def jobs() -> list[Job]:
    """Return all jobs, those that matter most first."""
    found = []
    for tokens in (1, 8, 64, 256, 1024, 8192, 16, 32, 128, 512):
        for name, matrix in MATRICES.items():
            if name == "large":
                continue
            for form in forms_of(name, tokens):
                plans = list(dict.fromkeys(plans_of(matrix, tokens, form)))
                found += [Job(name, tokens, "op", asdict(plan), form) for plan in plans]
            found += [Job(name, tokens, "op", "round")]
            if tokens > 1:
                found += [Job(name, tokens, "op", "library")]
            found += [Job(name, tokens, "op", "bf16")]
    for form in ("token", "block", "int8"):
        found += [Job("large", 4096, "product", asdict(plan), form) for plan in plans_of(MATRICES["large"], 4096, form)]
        found += [Job("large", 4096, "product", "library", form)] if form != "block" else []
    return [*found, Job("large", 4096, "product", "bf16")]


def forms_of(name: str, tokens: int) -> Iterator[str]:
    yield "token"
    if tokens <= 256 and name != "qkv":
        yield "group"
    yield "block"
    if tokens in (1, 64, 8192):
        yield "int8"


def plans_of(matrix: Matrix, tokens: int, form: str) -> Iterator[Plan]:
    """Yield the chosen plan, then others that might be faster."""
    outputs, inputs, gated = matrix.outputs, matrix.inputs, matrix.gate is not None
    blocked = form == "block"
    yield choose.choose_hopper(
        tokens, inputs, outputs, gated=gated, processors=PROCESSORS, blocked=blocked, between=form == "group"
    )
    if form == "group" and not gated and tokens <= 64:
        # A tile of 128 rows has all outputs of a scale, so its end could round for the op behind
        yield Stream(128, max(16, tokens), 256, 5 if tokens <= 32 else 4, 4)
    if tokens in (1, 8) and form in ("token", "group") and not gated:
        # Boxes with fewer rows beyond the last token; half as many barriers
        split = 2 if inputs > 8192 else 1
        for columns, block in ((8, 256), (8, 512), (16, 512)):
            yield Stream(64, columns, block, choose.RING // ((64 + columns) * block), split)
    if tokens in (1, 8) and form in ("token", "group") and gated:
        yield Stream(128, 8, 128, 6)
    if tokens <= 64:
        for rows in (64, 128):
            for columns in {max(16, tokens), max(16, tokens // 2)}:
                tiles = -(-outputs // rows) * -(-tokens // columns)
                for long in (False, True):
                    plan = choose.stream(
                        rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=long and not gated
                    )
                    yield plan
                    if form == "token" and tokens == 64:
                        yield Stream(**(asdict(plan) | {"promote": True}))
    elif tokens <= 512:
        if form != "group":
            yield Tiles(6, promote=True) if blocked else Tiles()
        for rows, columns in ((64, 64), (64, 128), (128, 128)) if gated else ((64, 128), (128, 128), (64, 256)):
            if columns > tokens or (form != "token" and columns == 256) or (blocked and gated and columns == 128):
                continue
            tiles = -(-outputs // rows) * -(-tokens // columns)
            yield choose.stream(rows, columns, inputs, tiles, gated=gated, processors=PROCESSORS, long=not gated)
    if (tokens >= 256 and form == "block") or (tokens >= 1024 and form == "token"):
        yield from (Tiles(4, promote=True, tokens=256), Tiles(6, promote=True))


def plan_of(fields: dict[str, Any]) -> Plan:
    return Stream(**fields) if "rows" in fields else Tiles(**fields)


@dataclass(frozen=True)
class Given:
    """The arguments of a call."""

    x_TI: Tensor
    residual_TI: Tensor | None
    norm_I: Tensor | None
    weight: Eight
    plain_OI: Tensor | None = None
    rounded: Rounded | None = None
    room: Rounded | None = None


def run(job: Job, given: Given) -> Tensor:
    """Launch what a job is about."""
    matrix, g, _dtype = MATRICES[job.matrix], given, torch.bfloat16
    if job.plan == "bf16":
        assert g.plain_OI is not None
        if g.norm_I is None:
            return gemm.linear(g.x_TI, g.plain_OI, None)
        return gemm.norm_linear(g.x_TI, g.residual_TI, g.norm_I, EPS, g.plain_OI, None, matrix.gate)[0]
    plan = plan_of(job.plan) if isinstance(job.plan, dict) else None
    x = g.rounded
    if (job.what == "op" and job.form != "group") or x is None:
        x, _ = round_rows(
            g.x_TI, g.residual_TI, g.norm_I, EPS, g.weight.number_OI.dtype, g.weight.activations or "token", None
        )
    if job.plan == "round":
        return x.q_TI
    if job.form == "group":
        return rounded_linear(x if g.rounded is None else g.rounded, g.weight, None, matrix.gate, plan, g.room)
    if plan is None:
        y_TO = library.product(x, g.weight, None)
        return gemm.gated_activation(y_TO, matrix.gate) if matrix.gate else y_TO
    return rounded_linear(x, g.weight, None, matrix.gate, plan)


# Compilation


def compile_one(job: Job) -> tuple[str, str]:
    """Compile what a job launches, on tensors that have no memory."""
    settle_cache_keys()
    matrix, meta = MATRICES[job.matrix], torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    blocked = job.form == "block"
    shape = (-(-matrix.rows // 128), -(-matrix.inputs // 128)) if blocked else (matrix.rows, 1)
    kind = torch.int8 if job.form == "int8" else torch.float8_e4m3fn
    weight = Eight(
        empty(matrix.rows, matrix.inputs, dtype=kind), empty(*shape, dtype=torch.float32), blocked,
        "block" if blocked else "token",
    )  # fmt: skip
    x_TI = empty(job.tokens, matrix.inputs)
    residual, norm = (x_TI, empty(matrix.inputs)) if matrix.normed else (None, None)
    fed, given_room = rooms(job, x_TI.device)
    try:
        with compiling_for("sm_90", PROCESSORS):
            run(job, Given(x_TI, residual, norm, weight, empty(matrix.rows, matrix.inputs), fed, given_room))
    except Exception as error:
        return str(job), f"{type(error).__name__}: {error}"[-1500:]
    return str(job), ""


# The child


class Bench:
    """Weights of one matrix in one form at a time, on the GPU."""

    def __init__(self) -> None:
        self.device, self.held, self.weights = torch.device("cuda"), ("", ""), list[tuple[Eight, Tensor | None]]()

    def load(self, job: Job) -> None:
        form = "bf16" if job.plan == "bf16" else job.form.replace("group", "token")
        if self.held == (job.matrix, form):
            return
        self.weights, self.held = [], (job.matrix, form)
        torch.cuda.empty_cache()
        matrix = MATRICES[job.matrix]
        copies = max(2, -(-200_000_000 // (matrix.rows * matrix.inputs * (2 if form == "bf16" else 1))))
        self.weights = [self._weight(matrix, form) for _ in range(copies)]

    def _weight(self, matrix: Matrix, form: str) -> tuple[Eight, Tensor | None]:
        normal_OI = torch.empty(matrix.rows, matrix.inputs, dtype=torch.bfloat16, device=self.device).normal_()
        plain = normal_OI * matrix.inputs**-0.5
        if form == "bf16":
            return Eight(plain, plain), plain
        blocked = form == "block"
        shape = (-(-matrix.rows // 128), -(-matrix.inputs // 128)) if blocked else (matrix.rows, 1)
        scale = (0.5 + torch.rand(shape, device=self.device)) * matrix.inputs**-0.5
        if form == "int8":
            return Eight((normal_OI * 40).clamp(-127, 127).to(torch.int8), scale / 40), None
        number_OI = (normal_OI * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Eight(number_OI, scale / 100, blocked, "block" if blocked else "token"), None

    def given(self, job: Job) -> list[Given]:
        matrix = MATRICES[job.matrix]
        found = []
        for weight, plain_OI in self.weights:
            x_TI = torch.randn(job.tokens, matrix.inputs, device=self.device).bfloat16()
            residual_TI = torch.randn_like(x_TI) if matrix.normed else None
            norm_I = torch.ones(matrix.inputs, dtype=torch.bfloat16, device=self.device) if matrix.normed else None
            rounded = None
            if job.what == "product" and job.plan != "bf16":
                kind, how = weight.number_OI.dtype, weight.activations or "token"
                rounded, _ = round_rows(x_TI, residual_TI, norm_I, EPS, kind, how, None)
            fed, given_room = rooms(job, self.device)
            if fed is not None:
                round_into(x_TI, fed)
                rounded = fed
            found.append(Given(x_TI, residual_TI, norm_I, weight, plain_OI, rounded, given_room))
        return found

    def check(self, job: Job, given: Given) -> float:
        """Return the largest error of a few tokens, in standard deviations of the result. Compare a second launch."""
        matrix, empty = MATRICES[job.matrix], torch.empty
        torch.empty = spoiled  # type: ignore[assignment]
        try:
            first, second = (self._numbers(run(job, given), given) for _ in range(2))
        finally:
            torch.empty = empty  # type: ignore[assignment]
        assert torch.equal(first.nan_to_num(1e9), second.nan_to_num(1e9)), "two launches differ"
        if job.plan == "round":
            return 0.0
        picked = torch.arange(job.tokens, device=self.device)
        picked = torch.cat((picked[:24], picked[-24:]))
        s_TI = given.x_TI if given.residual_TI is None else given.x_TI + given.residual_TI
        n_TI = s_TI[picked].float()
        if given.norm_I is not None:
            n_TI = n_TI * torch.rsqrt((n_TI**2).mean(1, keepdim=True) + EPS)
        if job.plan == "bf16":
            weight_OI = given.plain_OI.float()  # type: ignore[union-attr]
        else:
            weight_OI = given.weight.number_OI.float()
            scale = given.weight.scale
            if given.weight.blocked:
                scale = scale.repeat_interleave(128, 0)[: matrix.rows].repeat_interleave(128, 1)[:, : matrix.inputs]
            weight_OI *= scale
            how = given.weight.activations or "token"
            kind = given.weight.number_OI.dtype
            x, _ = round_rows(given.x_TI, given.residual_TI, given.norm_I, EPS, kind, how, None)
            n_TI = (x if given.rounded is None else given.rounded).wide()[picked]
        want = n_TI @ weight_OI.T
        want = gated_activation(want, matrix.gate) if matrix.gate else want
        error = ((first[picked] - want).abs() / (1 + want.abs())).max().item()
        assert error < 0.1, f"error {error}"  # NaN too
        return error

    def _numbers(self, y_TO: Tensor, given: Given) -> Tensor:
        return y_TO.float() if given.room is None else given.room.wide()

    def time(self, job: Job) -> dict[str, Any]:
        """Return the largest error, microseconds a call, and the limit."""
        self.load(job)
        given = self.given(job)
        error = self.check(job, given[0])
        seconds = limit(job)
        calls = len(given) * max(1, round(1e-3 / (seconds * len(given))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(job, given[i % len(given)])
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
        return {"us": best, "limit_us": seconds * 1e6, "error": error}


def rooms(job: Job, device: torch.device) -> tuple[Rounded | None, Rounded | None]:
    """Return the rounded activations of a job of the form "group" before they are filled, and room for its results."""
    matrix, feeds = MATRICES[job.matrix], job.form == "group"
    fed = room(job.tokens, matrix.inputs, torch.bfloat16, device) if feeds and not matrix.normed else None
    return fed, room(job.tokens, matrix.outputs, torch.bfloat16, device) if feeds and matrix.gate else None


def spoiled(*shape: Any, **options: Any) -> Tensor:
    """Return memory that shows what a kernel leaves unwritten."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    fresh = torch.zeros(shape, **options)
    return fresh.fill_(torch.nan) if fresh.dtype in (torch.float32, torch.bfloat16) else fresh


def flops(job: Job) -> float:
    matrix = MATRICES[job.matrix]
    return 2.0 * job.tokens * matrix.rows * matrix.inputs


def limit(job: Job) -> float:
    """Return the least seconds of a call."""
    matrix, tokens = MATRICES[job.matrix], job.tokens
    moved = tokens * (2 * matrix.inputs * (3 if matrix.normed else 1) + 2 * matrix.outputs)
    if job.plan == "round":
        return tokens * matrix.inputs * (7 if matrix.normed else 3) / RATE
    wide = 2 if job.plan == "bf16" else 1
    return max((matrix.rows * matrix.inputs * wide + moved) / RATE, flops(job) / FLOPS * wide)


def child(path: str) -> None:
    """Do the jobs of a file, and print a line for each."""
    torch.manual_seed(0)
    bench = Bench()
    for number, fields in json.loads(Path(path).read_text()):
        broken = False
        try:
            answer = bench.time(Job(**fields))
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
                pending = {i: o for i, o in pending.items() if isinstance(o.plan, str) or not alike(job, o)}
    return answers


def alike(a: Job, b: Job) -> bool:
    """Return True if two jobs launch the same kernel with the same constants, or nearly so."""
    if isinstance(a.plan, str) or isinstance(b.plan, str):
        return a.plan == b.plan and a.form == b.form
    gates = MATRICES[a.matrix].gate, MATRICES[b.matrix].gate
    return gates[0] == gates[1] and a.form == b.form and {**a.plan, "stages": 0} == {**b.plan, "stages": 0}


def one_child(path: Path, number: int, until: float) -> Iterator[dict[str, Any]]:
    """Yield the answers of a child. The last one has no number if the child hung or died over the next job."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(path)]
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
    """Print for each case the best cut of ours, then the others behind it."""
    cases: dict[tuple[str, int, str], list[tuple[float, Job, dict[str, Any]]]] = {}
    for number, answer in answers.items():
        if "failed" not in answer:
            job = found[number]
            cases.setdefault((job.matrix, job.tokens, job.form), []).append((answer["us"], job, answer))
    for (matrix, tokens, form), rows in cases.items():
        ours = sorted((row for row in rows if isinstance(row[1].plan, dict)), key=lambda row: row[0])
        others = "  ".join(f"{row[1].plan} {row[0]:.1f}" for row in rows if isinstance(row[1].plan, str))
        if not ours:
            print(f"{matrix:8s} T {tokens:5d} {form:6s} {others}")
            continue
        us, job, answer = ours[0]
        behind = "  ".join(f"{short(job.plan)} {us:.1f} e{a['error']:.3f}" for us, job, a in ours[1:])
        print(
            f"{matrix:8s} T {tokens:5d} {form:6s} {us:8.1f} µs {100 * answer['limit_us'] / us:5.1f} % "
            f"{flops(job) / us / 1e6:6.0f} TFLOP/s e{answer['error']:.3f} {short(job.plan)} | {others} | {behind}"
        )


def short(plan: dict[str, Any] | str) -> str:
    if isinstance(plan, str):
        return plan
    mark = "p" if plan.get("promote") else ""
    if "rows" not in plan:
        return f"tiles{plan['tokens']}s{plan['stages']}{mark}"
    return f"{plan['rows']}x{plan['tokens']}b{plan['block']}s{plan['stages']}/{plan['split']}{mark}"


def picked(
    found: list[Job], tokens: list[int] | None, forms: list[str] | None, matrices: list[str] | None
) -> list[Job]:
    wanted: Callable[[Job], bool] = lambda job: (  # noqa: E731
        (not tokens or job.tokens in tokens)
        and (not forms or job.form in forms)
        and (not matrices or job.matrix in matrices)
    )
    return [job for job in found if wanted(job)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--seconds", type=float, default=100, help="stop by then")
    parser.add_argument("--tokens", type=int, action="append", help="default: all")
    parser.add_argument("--matrix", action="append", choices=tuple(MATRICES), help="default: all")
    parser.add_argument("--form", action="append", choices=("token", "group", "block", "int8"), help="default: all")
    parser.add_argument("--compile-only", action="store_true", help="compile all kernels, which needs no GPU, and end")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        settle_cache_keys()
        child(arguments.child)
        return
    started = time.monotonic()
    found = picked(jobs(), arguments.tokens, arguments.form, arguments.matrix)
    kernels = {(job.matrix, job.form, str(job.plan)): job for job in found if job.plan != "library"}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        compiled = list(pool.map(compile_one, kernels.values()))
    for name, error in compiled:
        if error:
            print(f"NOT COMPILED {name}: {error}")
    print(f"{len(compiled)} launches compiled in {time.monotonic() - started:.0f} s", flush=True)
    if arguments.compile_only:
        return
    answers = work(found, Path("/tmp/sweep_fp8_jobs.json"), started + arguments.seconds)
    show(found, answers)
    print(f"{len(answers)} of {len(found)} jobs in {time.monotonic() - started:.0f} s")
    if arguments.json:
        rows = [asdict(found[number]) | answer for number, answer in answers.items()]
        arguments.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
