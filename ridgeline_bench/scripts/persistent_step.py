"""A decoding step in one cooperative launch beside the least time of its bytes, and beside the engine's captured step.

    python -m ridgeline_bench.scripts.persistent_step [--models llama-1b qwen3-0.6b] [--rows 1 2 4 8] [--splits 1 4]
        [--context 512] [--depth 1024] [--joins] [--engine] [--quick] [--output FILE.jsonl]

Weights are random, and so is a cache of --context tokens a row. A step is first compared with its reference in plain
torch, and timed only if they agree. `limit` is all weights and all cached keys and values, each read once, at the
device's bandwidth. The persistent step ends with the scores of all tokens; the engine's samples, too. --depth is the
inputs of a stage of the ring. With --joins every block of `out` combines the splits for itself. --quick plans and
validates the schedules, on the CPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.assembly import assemble
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.cuda.compile import cubin
from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.cases import LLAMA_1B, QWEN3_06B, distance, step_case
from ridgeline.kernels.step.persistent.cuda.run import ARCH, SOURCE, LaunchPlan, PersistentStep
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.validate import validate
from ridgeline.perf.hardware import find
from ridgeline_bench.machine.timing import median_seconds
from ridgeline_bench.profile.contexts import seconds_of
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import OneOf, asked, keep

MODELS = {"llama-1b": LLAMA_1B, "qwen3-0.6b": QWEN3_06B}
WITHIN = 2e-2  # of the norm of the reference's scores; bfloat16 alone takes about a half of it
PAGE, BLOCKS, H200 = 16, 132, "NVIDIA H200"


def limit(shape: DenseShape, rows: int, context: int) -> float:
    """Return the seconds in which a device reads what a step must read. Without a GPU it is an H200."""
    cached = shape.layers * rows * context * 2 * shape.kv_heads * shape.head_dim
    return 2 * (shape.weight_numbers + cached) / find(gpu() or H200).bandwidth


def compiled(shape: DenseShape, rows: int, splits: int, depth: int, joins: bool) -> bytes:
    """Return the machine code of a step."""
    plan = LaunchPlan.of(shape, rows, PAGE, build(shape, rows, BLOCKS, splits, joins=joins), splits, depth)
    return cubin(SOURCE, ARCH, plan.defines)


def persistent(
    shape: DenseShape, rows: int, splits: int, context: int, depth: int, joins: bool, code: bytes
) -> tuple[float, float]:
    """Return (the distance from the reference, over its norm; the seconds of a step, or 0 if that is too far)."""
    case = step_case(shape, [context - 1] * rows, BLOCKS, splits, page=PAGE, depth=depth, joins=joins, device="cuda")
    step = PersistentStep(case.plan, case.schedule, case.weights, case.inputs, case.buffers, code)
    found = step().clone()
    error = distance(found, case.fresh().reference(build(shape, rows, 1, splits)))
    return error, median_seconds([step], torch.device("cuda")) if error <= WITHIN else 0.0


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
            enable_prefix_caching=False, gpu_memory_utilization=0.5,
        )  # fmt: skip
        assembly = assemble(asked_for)
        try:
            shapes = {rows: StepShape([1] * rows, [context] * rows, rows) for rows in all_rows}
            return {rows: seconds_of(assembly, each, repeats=31) for rows, each in shapes.items()}
        finally:
            assembly.engine.shutdown()


def planned(shape: DenseShape, rows: int, splits: int, depth: int, joins: bool) -> str:
    """Return a line about a schedule for an H200, which was validated."""
    schedule = build(shape, rows, BLOCKS, splits, joins=joins)
    started = time.perf_counter()
    validate(schedule, BLOCKS)
    seconds = time.perf_counter() - started
    plan = LaunchPlan.of(shape, rows, PAGE, schedule, splits, depth)
    return f"{len(schedule.tasks)} tasks, valid after {seconds:.1f} s, {plan.stages} stages of {plan.depth}"


def main() -> None:
    a = asked(
        __doc__, models=[OneOf(MODELS)], rows=[1, 2, 4, 8], splits=[1, 4], context=512, depth=1024,
        joins=(False, "the blocks of `out` combine the splits"), engine=(False, "the engine's captured step, too"),
        quick=(False, "schedules alone"), output=Path,
    )  # fmt: skip
    console = Console()
    if a.quick:
        for name in a.models:
            for rows in a.rows:
                for splits in a.splits:
                    told = planned(MODELS[name], rows, splits, a.depth, a.joins)
                    console.print(f"{name}, {rows} rows, {splits} splits: {told}", highlight=False)
        return
    table = Table("model", "rows", "splits", "error", "persistent ms", "limit ms", "x limit", "engine ms", title=gpu())
    for name in a.models:
        shape = MODELS[name]
        engines = engine(shape, a.rows, a.context) if a.engine else {}
        pairs = [(rows, splits) for rows in a.rows for splits in a.splits]
        with ThreadPoolExecutor() as pool:
            codes = list(pool.map(partial(compiled, shape, depth=a.depth, joins=a.joins), *zip(*pairs, strict=True)))
        for (rows, splits), code in zip(pairs, codes, strict=True):
            least = 1e3 * limit(shape, rows, a.context)
            error, seconds = persistent(shape, rows, splits, a.context, a.depth, a.joins, code)
            own, ms = 1e3 * engines.get(rows, 0.0), 1e3 * seconds
            cells = f"{error:.1e}", f"{ms:.4f}", f"{least:.4f}", f"{ms / least:.2f}", f"{own:.4f}"
            table.add_row(name, str(rows), str(splits), *cells)
            console.print(name, rows, splits, *cells, highlight=False)
            line = {"kind": "persistent_step", "model": name, "rows": rows, "splits": splits, "ms": ms}
            keep(a.output, line | {"limit_ms": least, "engine_ms": own, "context": a.context, "error": error})
    console.print(table)


if __name__ == "__main__":
    main()
