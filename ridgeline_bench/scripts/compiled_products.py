"""Products that the compiler makes for Hopper: packed where MLIR is, searched and timed where the GPU is.

    python -m ridgeline_bench.scripts.compiled_products print               # one product after each pass, as text
    python -m ridgeline_bench.scripts.compiled_products pack --file products.tar.xz [--candidates 120]
    python -m ridgeline_bench.scripts.compiled_products run --file products.tar.xz [--output FILE.jsonl]

`pack` compiles the candidates of a search and products to check: sizes that are no multiples of tiles, matrices that
lie the other way, epilogues. `run` checks them against torch, then lets the search time candidates at 4096³, and sets
the winner and its epilogues beside cuBLAS, Triton and the ladder's naive kernel. With records of an earlier run `pack`
takes candidates that their times make likely.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.compiler.graph import OpGraph
from ridgeline.compiler.products.launch import LoadedProduct, ProductLaunch
from ridgeline.compiler.products.matrices import matrix_shapes
from ridgeline.compiler.products.schedule import HopperSchedule
from ridgeline.compiler.products.search import LearnedCost, agreement, described, neighbours, predicted_seconds, space
from ridgeline.perf.search import Found, Search, SearchSettings, Unfit
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, keep, told

SIZE = 4096
NAIVE = "naive"
FUSED = HopperSchedule(rows=256, columns=128, cluster=(2, 1), raster=4, blocks=128, staging=1, running=0)
FUSED_IN_TURN = HopperSchedule(rows=128, columns=128, cluster=(2, 1), raster=4, staging=2, stages=5, turns=True)
# whose epilogues are timed
Epilogue = Callable[..., Tensor]
Ways = dict[str, Sequence[Callable[[], object]]]


def bare(sums: Tensor) -> Tensor:
    return sums.bfloat16()


def bias(sums: Tensor, b: Tensor) -> Tensor:
    return (sums + b).bfloat16()


def bias_silu(sums: Tensor, b: Tensor) -> Tensor:
    return functional.silu(sums + b).bfloat16()


def scaled(sums: Tensor, rows: Tensor) -> Tensor:
    return (sums * rows * 0.5).bfloat16()


def residual(sums: Tensor, r: Tensor) -> Tensor:
    return (sums + r).bfloat16()


def all_of_them(sums: Tensor, b: Tensor, rows: Tensor, r: Tensor) -> Tensor:
    return (functional.silu(sums * rows + b) * 0.5 + r).bfloat16()


EPILOGUES: dict[str, tuple[Epilogue, tuple[str, ...]]] = {
    "bare": (bare, ()),
    "bias": (bias, ("columns",)),
    "bias_silu": (bias_silu, ("columns",)),
    "scaled": (scaled, ("rows",)),
    "residual": (residual, ("whole",)),
    "all_of_them": (all_of_them, ("columns", "rows", "whole")),
}  # a function of the sum, and what shapes its other inputs have
DTYPES = {"columns": torch.bfloat16, "rows": torch.float32, "whole": torch.bfloat16}


@dataclass(frozen=True)
class PackedProduct:
    """A product to be compiled. kind: "check", "candidate", or "epilogue", which is timed beside the bare product."""

    kind: str
    sizes: tuple[int, int, int]
    by_k: tuple[bool, bool]
    epilogue: str
    schedule: HopperSchedule


@dataclass
class LoadedPack:
    """The products of a file, each with its launch, code and figures of ptxas, and the naive kernel's code."""

    products: list[tuple[PackedProduct, ProductLaunch, bytes, dict[str, Any]]] = field(default_factory=list)
    naive: bytes = b""


def shape_of(what: str, m: int, n: int) -> tuple[int, ...]:
    return {"columns": (n,), "rows": (m, 1), "whole": (m, n)}[what]


def epilogue_graph(name: str, m: int, n: int) -> OpGraph:
    """Return an epilogue as the compiler's graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from ridgeline.compiler.backend import decompositions
    from ridgeline.compiler.capture import capture
    from ridgeline.compiler.passes.canonicalize import canonicalize

    function, others = EPILOGUES[name]
    with FakeTensorMode():
        given = [torch.empty(m, n), *(torch.empty(shape_of(each, m, n), dtype=DTYPES[each]) for each in others)]
        return canonicalize(capture(make_fx(function, decomposition_table=decompositions())(*given)))


def compiled_one(product: PackedProduct) -> tuple[dict[str, Any], bytes] | str:
    """Return a product's launch and code, or why there is none."""
    from ridgeline.compiler.products.compiled import compiled
    from ridgeline.compiler.products.text import ProductSpec
    from ridgeline.core.errors import RidgelineError

    m, n, k = product.sizes
    spec = ProductSpec(m, n, k, epilogue_graph(product.epilogue, m, n), torch.bfloat16, *product.by_k)
    try:
        made = compiled(spec, product.schedule)
    except RidgelineError as error:
        return str(error)
    return {
        "launch": made.launch.record(),
        "registers": made.code.registers,
        "spilled": made.code.spilled,
    }, made.code.cubin


def checks() -> Iterable[PackedProduct]:
    """Yield products that say whether code is right: each way that matrices lie, sizes that no tile divides, and
    epilogues."""
    plain, staged = HopperSchedule(), HopperSchedule(staging=2, cluster=(2, 1))
    deep = HopperSchedule(rows=192, columns=192, warpgroups=3, stages=4, running=0, raster=2, cluster=(1, 1))
    wide = HopperSchedule(rows=256, columns=128, cluster=(1, 2), staging=1, stages=4)
    four = HopperSchedule(rows=128, columns=128, cluster=(2, 2), staging=2, stages=5, raster=1)
    turns = HopperSchedule(rows=64, cluster=(2, 1), staging=1, stages=4, turns=True)
    ways = ((True, True), (True, False), (False, True), (False, False))
    for at, schedule in enumerate((plain, staged, deep, wide, four, FUSED_IN_TURN, turns)):
        for by_k in ways:
            yield PackedProduct("check", (520, 1032, 328), by_k, "bare", schedule)
        name = ("bias_silu", "all_of_them", "residual", "all_of_them", "scaled", "bias_silu", "all_of_them")[at]
        yield PackedProduct("check", (1288, 776, 64), ways[at % 4], name, schedule)
    yield PackedProduct("check", (8, 4096, 4096), (True, True), "bias_silu", staged)
    for schedule in (staged, FUSED_IN_TURN, turns):  # many tiles for a block
        yield PackedProduct("check", (2048, 4104, 2048), (True, True), "all_of_them", schedule)


def chosen(count: int, records: Sequence[Path], seed: int, turns: bool) -> list[HopperSchedule]:
    """Return the candidates of a pack, all in which warpgroups take turns or none: the best by the model, which learns
    from records of earlier runs, neighbours of the fastest, and some drawn from those that are not hopeless."""
    random, cost, seen = Random(seed), LearnedCost(SIZE, SIZE, SIZE), []
    for path in records:
        for line in map(json.loads, path.read_text().splitlines()):
            for trial in line.get("trials", []):
                if "us" in trial:
                    schedule = HopperSchedule(**{**trial["schedule"], "cluster": tuple(trial["schedule"]["cluster"])})
                    cost.observe(schedule, 1e-6 * trial["us"])
                    seen.append((trial["us"], schedule))
    parents = [each for _, each in sorted(seen, key=lambda pair: pair[0]) if each.turns == turns][:8]
    ranked = [each for each in space() if each.turns == turns]
    ranked.sort(key=lambda each: (cost(each), random.random()))
    bound = 1.5 * cost(ranked[0])
    near = [each for parent in parents or ranked[:4] for each in neighbours(parent, random) if each.turns == turns]
    near.sort(key=cost)
    likely = [each for each in ranked if cost(each) < bound]
    picked = [
        *parents,
        *ranked[: count * 2 // 5],
        *near[: count * 2 // 5],
        *random.sample(likely, min(count, len(likely))),
    ]
    return list(dict.fromkeys(picked))[:count]


def pack(file: Path, count: int, records: Sequence[Path], seed: int, *, turns: bool) -> None:
    """Compile the products and candidates in as many processes as there are processors."""
    began, whole = time.monotonic(), (SIZE, SIZE, SIZE)
    schedules = chosen(count, records, seed, turns)
    wanted = [*checks(), *(PackedProduct("candidate", whole, (True, True), "bare", each) for each in schedules)]
    for each in [*dict.fromkeys((FUSED_IN_TURN if turns else FUSED, *schedules[:2]))]:
        wanted += [PackedProduct("epilogue", whole, (True, True), name, each) for name in EPILOGUES]
        wanted.append(PackedProduct("epilogue", whole, (True, False), "bare", each))
    index, codes = [], []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for product, made in zip(wanted, pool.map(compiled_one, wanted, chunksize=4), strict=True):
            if isinstance(made, str):
                print(f"{product.kind} {described(product.schedule)}: {made[:200]}", file=sys.stderr)
                continue
            index.append({**asdict(product), **made[0]})
            codes.append(made[1])
    seconds = time.monotonic() - began
    with tarfile.open(file, "w:xz") as tar:
        about = {"products": index, "seconds": round(seconds, 1), "processors": os.cpu_count()}
        _add(tar, "index.json", json.dumps(about).encode())
        _add(tar, "naive.cubin", naive_code())
        for at, code in enumerate(codes):
            _add(tar, f"{at}.cubin", code)
    print(f"{len(index)} products of {len(wanted)} in {seconds:.0f} s, {file.stat().st_size >> 10} KiB")


def naive_code() -> bytes:
    from ridgeline.kernels.cuda.carried import code_of
    from ridgeline.kernels.gemm.ladder.rungs import RUNGS

    return code_of(next(each for each in RUNGS if each.name == NAIVE), "sm_90", None, "")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def unpacked(file: Path) -> LoadedPack:
    with tarfile.open(file, "r:xz") as tar:

        def read(name: str) -> bytes:
            found = tar.extractfile(name)
            assert found is not None
            return found.read()

        made = LoadedPack(naive=read("naive.cubin"))
        for at, line in enumerate(json.loads(read("index.json"))["products"]):
            schedule = HopperSchedule(**{**line["schedule"], "cluster": tuple(line["schedule"]["cluster"])})
            product = PackedProduct(line["kind"], tuple(line["sizes"]), tuple(line["by_k"]), line["epilogue"], schedule)
            about = {name: line[name] for name in ("registers", "spilled")}
            made.products.append((product, ProductLaunch.read(line["launch"]), read(f"{at}.cubin"), about))
    return made


class Operands:
    """Matrices of a product in sets, so that a call does not find the last one's in the cache, and what its epilogue
    reads."""

    def __init__(
        self, sizes: tuple[int, int, int], by_k: tuple[bool, bool], *, sets: int = 1, whole: bool = True
    ) -> None:
        """whole: of whole numbers, whose sums are exact; else normal ones, which take the power that products take."""
        m, n, _ = sizes
        self.sizes, self.by_k = sizes, by_k
        shapes = matrix_shapes(sizes, by_k)
        draw = partial(torch.randint, -3, 4) if whole else torch.randn
        self.left, self.right = ([draw(shape, device="cuda").bfloat16() for _ in range(sets)] for shape in shapes)
        self.whole = whole
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.extra = {
            name: torch.randn(shape_of(name, m, n), device="cuda").to(dtype) for name, dtype in DTYPES.items()
        }

    def exact(self) -> Tensor:
        """Return the first set's sums in float32, which has those of whole numbers as they are."""
        left = self.left[0].float() if self.by_k[0] else self.left[0].float().T
        right = self.right[0].float().T if self.by_k[1] else self.right[0].float()
        return left @ right

    def extras(self, name: str) -> list[Tensor]:
        return [self.extra[each] for each in EPILOGUES[name][1]]

    def calls(self, product: LoadedProduct, epilogue: str) -> list[Callable[[], None]]:
        pairs = zip(self.left, self.right, strict=True)
        return [product.bound(left, right, self.out, self.extras(epilogue)) for left, right in pairs]

    def fault(self, product: Callable[[], None], epilogue: str, exact: Tensor) -> str:
        """Return "", or how the result of a product differs."""
        self.out.fill_(torch.nan)
        product()
        wanted = EPILOGUES[epilogue][0](exact, *self.extras(epilogue))
        if epilogue == "bare" and self.whole:
            wrong = self.out != wanted
        else:
            bound = 0.01 * wanted.float().abs() + (0.02 if self.whole else 0.05)
            wrong = ~((self.out.float() - wanted.float()).abs() <= bound)
        if count := int(wrong.sum()):
            at = wrong.nonzero()[0].tolist()
            return f"{count} of {wrong.numel()} numbers are wrong, the first at {at}: {self.out[*at]} for {wanted[*at]}"
        return ""


def check(found: LoadedPack, driver: Any) -> int:
    """Run the products to check. Return the number that is wrong."""
    red = 0
    for product, launch, code, _ in found.products:
        if product.kind != "check":
            continue
        operands = Operands(product.sizes, product.by_k)
        try:
            loaded = LoadedProduct(driver, code, launch, torch.cuda.current_device())
            (call,) = operands.calls(loaded, product.epilogue)
            why = operands.fault(call, product.epilogue, operands.exact())
            torch.cuda.synchronize()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            red += 1
            print(f"WRONG {product.sizes} {product.by_k} {product.epilogue} {described(product.schedule)}: {why}")
            if "error" in why.lower():
                break
    print(f"checks: {sum(each[0].kind == 'check' for each in found.products)}, wrong: {red}", flush=True)
    return red


def searched(found: LoadedPack, driver: Any, operands: Operands, seconds: float) -> tuple[Found[HopperSchedule], Any]:
    """Return the record of a search among the candidates of a pack, and its model."""
    packed = {each[0].schedule: each for each in found.products if each[0].kind == "candidate"}
    cost, exact = LearnedCost(SIZE, SIZE, SIZE), operands.exact()

    def prepare(schedule: HopperSchedule) -> Callable[[], float]:
        _, launch, code, _ = packed[schedule]
        try:
            calls = operands.calls(LoadedProduct(driver, code, launch, torch.cuda.current_device()), "bare")
            why = operands.fault(calls[0], "bare", exact)
        except Exception as error:
            raise Unfit(str(error)) from error
        if why:
            raise Unfit(why)
        replay = captured(calls)

        def timer() -> float:
            took = device_seconds(replay) / len(calls)
            cost.observe(schedule, took)
            return took

        return timer

    def near(schedule: HopperSchedule, random: Random) -> Iterable[HopperSchedule]:
        mine = asdict(schedule)
        return [each for each in packed if sum(mine[name] != value for name, value in asdict(each).items()) <= 3]

    settings = SearchSettings(
        measured=min(48, len(packed)),
        first=3,
        repeats=10,
        behind=1.12,
        seconds=seconds,
        generations=6,
        children=16,
        parents=4,
    )
    search = Search(cost=cost, prepare=prepare, neighbours=near, settings=settings)
    return search.run(list(packed)[: settings.measured]), cost


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    from ridgeline_bench.scripts.product_turns import captured

    return captured(calls)


def in_turns(ways: Ways, turns: int = 40) -> dict[str, float]:
    """Return µs of a product of each way, the median of turns call by call."""
    graphs, found = {name: captured(calls) for name, calls in ways.items()}, dict[str, list[float]]()
    for turn in range(turns):
        for name, replay in list(graphs.items())[:: 1 if turn % 2 else -1]:
            found.setdefault(name, []).append(1e6 * device_seconds(replay) / len(ways[name]))
    return {name: statistics.median(each[turns // 4 :]) for name, each in found.items()}


def alone(ways: Ways, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Return µs and MHz of a product of each way that has the GPU for itself for so many seconds."""
    from ridgeline_bench.scripts import product_turns

    meter, found = product_turns.Meter(), dict[str, list[dict[str, float]]]()
    graphs = {name: captured(calls) for name, calls in ways.items()}
    for _ in range(rounds):
        for name, replay in graphs.items():
            found.setdefault(name, []).append(product_turns.alone(replay, len(ways[name]), seconds, meter))
    return {
        name: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for name, rows in found.items()
    }


def run(file: Path, seconds: float, commit: str, output: Path | None) -> int:
    """Check, search, and set the winner beside others. Return 0 if all was right."""
    from ridgeline.kernels.cuda.driver import CudaDriver

    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    driver, found = CudaDriver(), unpacked(file)
    if red := check(found, driver):
        return red
    line = {"machine": asdict(host_with(torch.device("cuda"), commit)), "size": SIZE}
    operands = Operands((SIZE, SIZE, SIZE), (True, True), sets=4, whole=False)
    record, cost = searched(found, driver, operands, seconds)
    if record.best is None:
        print("no candidate was fit")
        return 1
    keep(output, {**line, "workload": "search of products", **told_of(record, cost)})
    device, flops = torch.cuda.current_device(), 2e-6 * SIZE**3
    pairs = list(zip(operands.left, operands.right, strict=True))
    ways: Ways = {"cuBLAS": [partial(torch.mm, x, y.T, out=operands.out) for x, y in pairs]}
    for product, launch, code, _ in found.products:
        if product.kind == "candidate" and product.schedule == record.best.candidate:
            ways["ours"] = operands.calls(LoadedProduct(driver, code, launch, device), "bare")
    ways["Triton"] = triton_calls(operands)
    times, lone = in_turns(ways), alone(ways, 0.3, 3)
    times |= in_turns({"naive": naive_calls(found.naive, driver, operands)}, 3)
    for name, us in times.items():
        there = {key: round(value, 2) for key, value in lone.get(name, {}).items()}
        print(f"  {name:8} {us:8.1f} µs {flops / us:6.1f} TFLOP/s; alone {there}", flush=True)
        keep(output, {**line, "workload": "compiled product", "way": name, "us": us, "alone": there,
                      "schedule": record.best.candidate.record() if name == "ours" else None})  # fmt: skip
    return with_epilogues(found, driver, operands, partial(keep, output), line)


def with_epilogues(found: LoadedPack, driver: Any, operands: Operands, kept: Any, line: dict[str, Any]) -> int:
    """Time products with epilogues beside the bare one of the same schedule. Return the number that are wrong."""
    lying = Operands((SIZE, SIZE, SIZE), (True, False), sets=4, whole=False)
    pairs = list(zip(lying.left, lying.right, strict=True))
    exact, red = {True: operands.exact(), False: lying.exact()}, 0
    groups: dict[HopperSchedule, Ways] = {}
    for product, launch, code, _ in found.products:
        if product.kind != "epilogue":
            continue
        plain = product.by_k[1]
        right = operands if plain else lying
        loaded = LoadedProduct(driver, code, launch, torch.cuda.current_device())
        calls = right.calls(loaded, product.epilogue)
        if why := right.fault(calls[0], product.epilogue, exact[plain]):
            red += 1
            print(f"WRONG {product.epilogue} {described(product.schedule)}: {why}")
            continue
        name = product.epilogue if plain else f"{product.epilogue}, B by rows"
        groups.setdefault(product.schedule, {})[name] = calls
    for schedule, ways in groups.items():
        times = in_turns({"cuBLAS, B by rows": [partial(torch.mm, x, y, out=lying.out) for x, y in pairs], **ways})
        print(f"  {described(schedule)}")
        print("   ", ", ".join(f"{name} {us:.1f} ({us / times['bare']:.3f})" for name, us in times.items()), flush=True)
        kept({**line, "workload": "epilogues of a product", "schedule": schedule.record(), "us": times})
    return red


def told_of(record: Found[HopperSchedule], cost: LearnedCost) -> dict[str, Any]:
    """Return a search's record for JSON, and print its best."""
    timed = [trial for trial in record.trials if trial.times]
    taken = [1e6 * trial.seconds for trial in timed]
    counted = agreement([predicted_seconds(each.candidate, SIZE, SIZE, SIZE) for each in timed], taken)
    learned = agreement([cost(each.candidate) for each in timed], taken)
    print(f"search: {len(timed)} of {len(record.trials)} timed in {record.took:.1f} s; "
          f"pairs in order: {counted:.2f} counted, {learned:.2f} learned")  # fmt: skip
    for trial, us in list(zip(timed, taken, strict=True))[:8]:
        rate = 2e-6 * SIZE**3 / us
        print(f"  {us:7.1f} µs {rate:6.1f} TFLOP/s  {described(trial.candidate)} (generation {trial.generation})")
    lines = zip(record.record(described), record.trials, strict=True)
    trials = [{**line, "schedule": trial.candidate.record()} for line, trial in lines]
    return {"took": record.took, "pairs counted": counted, "pairs learned": learned, "trials": trials}


def triton_calls(operands: Operands) -> list[Callable[[], None]]:
    from ridgeline.kernels.gemm.ladder.triton_rungs import TRITON_RUNGS, call

    rung = next(each for each in TRITON_RUNGS if each.name == "triton_grouped")
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    pairs = zip(operands.left, operands.right, strict=True)
    return [partial(call, rung, x, y, operands.out, programs) for x, y in pairs]


def naive_calls(code: bytes, driver: Any, operands: Operands) -> list[Callable[[], None]]:
    """Return the ladder's first rung."""
    import tempfile

    from ridgeline.kernels.cuda.carried import file_of
    from ridgeline.kernels.gemm.ladder.run import LoadedRung
    from ridgeline.kernels.gemm.ladder.rungs import RUNGS

    rung = next(each for each in RUNGS if each.name == NAIVE)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file_of(rung, "sm_90")).write_bytes(code)
        loaded = LoadedRung(rung, Path(folder), driver)
    return [partial(loaded, operands.left[0], operands.right[0], operands.out)]


def print_stages(size: int) -> None:
    """Print a product with bias and silu after each pass."""
    from ridgeline.compiler.products.compiled import compiled
    from ridgeline.compiler.products.text import ProductSpec

    graph = epilogue_graph("bias_silu", size, size)
    print(f"// epilogue\n{graph}\n")
    spec = ProductSpec(size, size, size, graph)
    made = compiled(spec, HopperSchedule(staging=2, cluster=(2, 1)), lambda name, text: print(f"// {name}\n{text}\n"))
    print(
        f"// machine code: {len(made.code.cubin)} bytes, {made.code.registers} registers, {made.code.spilled} spilled"
    )


def main() -> None:
    a = asked(
        __doc__,
        "verb=print|pack|run",
        file=(Path, "the pack"),
        candidates=(120, "schedules in a pack"),
        seed=(0, "of what is drawn"),
        turns=(False, "pack schedules whose warpgroups take turns"),
        records=([Path], "results of earlier runs, for `pack`"),
        seconds=(30.0, "of the search"),
        size=(SIZE, "of the product that is printed"),
        commit=("", "of the checkout, where git cannot say it"),
        output=(Path, "the file of results"),
    )
    with told():
        if a.verb == "print":
            print_stages(a.size)
        elif a.verb == "pack":
            pack(a.file, a.candidates, a.records or [], a.seed, turns=a.turns)
        else:
            raise SystemExit(run(a.file, a.seconds, a.commit, a.output))


if __name__ == "__main__":
    main()
