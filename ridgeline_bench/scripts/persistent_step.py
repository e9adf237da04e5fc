"""A decoding step in one cooperative launch beside the least time of its bytes, and beside the engine's captured step.

    python -m ridgeline_bench.scripts.persistent_step [--models llama-1b qwen3-0.6b] [--rows 1 2 4 8] [--splits 1 4]
        [--context 512] [--depth 1024] [--warps 8] [--joins] [--counters] [--trace] [--engine] [--quick]
        [--output FILE.jsonl]

Weights are random, and so is a cache of --context tokens a row. A step is first compared with its reference in plain
torch, and timed only if they agree. `limit` is all weights and all cached keys and values, each read once, at the
measured bandwidth. The persistent step ends with the scores of all tokens; the engine's samples, too. --depth is the
inputs of a stage of the ring, and --warps how many compute. Numbers say by marks that they are there, or with
--counters blocks say what has ended. With --joins every block of `out` combines the splits for itself. --trace says
where a block's time goes. --quick plans and validates the schedules, on the CPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.assembly import assemble
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.cuda.compile import cubin
from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.cases import LLAMA_1B, QWEN3_06B, PersistentCase, distance, step_case
from ridgeline.kernels.step.persistent.cuda.run import ARCH, SOURCE, WARPS, LaunchPlan, PersistentStep, spent
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.validate import validate
from ridgeline.perf.hardware import find
from ridgeline_bench.machine.timing import median_seconds
from ridgeline_bench.profile.contexts import seconds_of
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import OneOf, asked, keep

MODELS = {"llama-1b": LLAMA_1B, "qwen3-0.6b": QWEN3_06B}
MORE = 1.5  # times the reference's own distance from float32: sums are made in another order
PAGE, BLOCKS, H200 = 16, 132, "NVIDIA H200"


class Measured(NamedTuple):
    """A step's distance from float32 over its norm, that of the reference in bfloat16, its seconds (0: it is wrong),
    and the µs of a block by kind of task: waiting for others, working, and in that waiting for weights."""

    error: float
    own: float
    seconds: float
    kinds: Mapping[str, tuple[float, float, float]]


def limit(shape: DenseShape, rows: int, context: int) -> float:
    """Return the seconds in which a device reads what a step must read. Without a GPU it is an H200."""
    cached = shape.layers * rows * context * 2 * shape.kv_heads * shape.head_dim
    return 2 * (shape.weight_numbers + cached) / find(gpu() or H200).attained().bandwidth


def compiled(shape: DenseShape, rows: int, splits: int, depth: int, joins: bool, warps: int, marked: bool) -> bytes:
    """Return the machine code of a step."""
    schedule = build(shape, rows, BLOCKS, splits, joins=joins, marked=marked)
    plan = LaunchPlan.of(shape, rows, PAGE, schedule, splits, depth, warps)
    return cubin(SOURCE, ARCH, plan.defines)


def persistent(case: PersistentCase, code: bytes, traces: bool) -> Measured:
    """Compare a step with its reference, and time it if it is no further from float32 than that allows."""
    step = PersistentStep(case.plan, case.schedule, case.weights, case.inputs, case.buffers, code)
    found, alone = step().clone(), build(case.shape, case.rows, 1, case.splits)
    exact = case.fresh(torch.float32).reference(alone)
    error, own = distance(found, exact), distance(case.fresh().reference(alone), exact)
    if not error <= MORE * own:
        return Measured(error, own, 0.0, {})
    seconds = median_seconds([step], torch.device("cuda"))
    return Measured(error, own, seconds, spent(case.schedule, step.traced(), seconds) if traces else {})


def engine(shape: DenseShape, all_rows: Sequence[int], context: int) -> dict[int, float]:
    """Return the device's seconds of the engine's step, sampling included, by its rows."""
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.head_eps else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.head_eps else "llama",
        "hidden_size": shape.width, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "rms_norm_eps": shape.eps, "rope_theta": 500000.0, "hidden_act": "silu",
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        asked_for = LLMConfig(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=max(all_rows),
            enable_prefix_caching=False, gpu_memory_utilization=0.5, capture_at_start=True,
        )  # fmt: skip
        assembly = assemble(asked_for)
        try:
            shapes = {rows: StepShape([1] * rows, [context] * rows, rows) for rows in all_rows}
            return {rows: seconds_of(assembly, each, repeats=31) for rows, each in shapes.items()}
        finally:
            assembly.engine.shutdown()


def planned(shape: DenseShape, rows: int, splits: int, depth: int, joins: bool, marked: bool) -> str:
    """Return a line about a schedule for an H200, which was validated."""
    schedule = build(shape, rows, BLOCKS, splits, joins=joins, marked=marked)
    started = time.perf_counter()
    validate(schedule, BLOCKS)
    seconds = time.perf_counter() - started
    plan = LaunchPlan.of(shape, rows, PAGE, schedule, splits, depth)
    return f"{len(schedule.tasks)} tasks, valid after {seconds:.1f} s, {plan.stages} stages of {plan.depth}"


def main() -> None:
    a = asked(
        __doc__, models=[OneOf(MODELS)], rows=[1, 2, 4, 8], splits=[1, 4], context=512, depth=1024, warps=WARPS,
        joins=(False, "the blocks of `out` combine the splits"),
        counters=(False, "counters in place of marks"), engine=(False, "the engine's captured step, too"),
        trace=(False, "where the time goes, by kind of task"), quick=(False, "schedules alone"), output=Path,
    )  # fmt: skip
    console = Console()
    if a.quick:
        for name in a.models:
            for rows in a.rows:
                for splits in a.splits:
                    told = planned(MODELS[name], rows, splits, a.depth, a.joins, not a.counters)
                    console.print(f"{name}, {rows} rows, {splits} splits: {told}", highlight=False)
        return
    table = Table(
        "model", "rows", "splits", "error", "bf16's", "persistent ms", "limit ms", "x limit", "engine ms", title=gpu()
    )
    for name in a.models:
        shape = MODELS[name]
        engines = engine(shape, a.rows, a.context) if a.engine else {}
        pairs = [(rows, splits) for rows in a.rows for splits in a.splits]
        make = partial(compiled, shape, depth=a.depth, joins=a.joins, warps=a.warps, marked=not a.counters)
        codes = [make(*pairs[0])]  # alone: threads that import NVRTC's package side by side find it half done
        with ThreadPoolExecutor() as pool:
            codes += pool.map(make, *zip(*pairs[1:], strict=True))
        for (rows, splits), code in zip(pairs, codes, strict=True):
            least = 1e3 * limit(shape, rows, a.context)
            positions = [a.context - 1] * rows
            case = step_case(
                shape, positions, BLOCKS, splits, page=PAGE, joins=a.joins, marked=not a.counters, device="cuda"
            )
            case = case.cut(depth=a.depth, warps=a.warps)
            error, bf16, seconds, kinds = persistent(case, code, a.trace)
            own, ms = 1e3 * engines.get(rows, 0.0), 1e3 * seconds
            cells = f"{error:.1e}", f"{bf16:.1e}", f"{ms:.4f}", f"{least:.4f}", f"{ms / least:.2f}", f"{own:.4f}"
            table.add_row(name, str(rows), str(splits), *cells)
            console.print(name, rows, splits, *cells, highlight=False)
            for kind, parts in kinds.items():
                told = "waits {:.1f} µs, works {:.1f} µs, of which for weights {:.1f} µs".format(*parts)
                console.print(f"    {kind}: {told}", highlight=False)
            line = {
                "kind": "persistent_step",
                "model": name,
                "rows": rows,
                "splits": splits,
                "joins": a.joins,
                "waits": "counters" if a.counters else "marks",
                "warps": a.warps,
            }
            times = {"ms": ms, "limit_ms": least, "engine_ms": own, "kinds": kinds}
            keep(a.output, line | times | {"context": a.context, "error": error, "bfloat16": bf16})
    console.print(table)


if __name__ == "__main__":
    main()
