"""`ridgeline compile`: a model's GPU kernels, compiled before they are needed, on any machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from multiprocessing import get_context
from operator import or_
from typing import TYPE_CHECKING

import typer

from ridgeline.cli.sizes import read_config
from ridgeline.core.config import DEFAULT_BLOCK_SIZE, DTYPES
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.model_spec import ModelSpec

if TYPE_CHECKING:
    from ridgeline.kernels.aot import Compiled

MULTIPROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}


def compile(
    model: str = typer.Argument(..., help="Folder, config.json or hub id. Weights are not needed."),
    arch: str = typer.Option(..., "--arch", help="What to compile for, such as sm_90 or gfx942."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    max_model_len: int = typer.Option(None, help="As the engine will be started with."),
    max_num_seqs: int = typer.Option(256, help="As the engine will be started with."),
    max_num_batched_tokens: int = typer.Option(8192, help="As the engine will be started with."),
    block_size: int = typer.Option(DEFAULT_BLOCK_SIZE["cuda"], help="As the engine will be started with."),
    multiprocessors: int = typer.Option(None, help="Of the GPU; default: of the largest common one of its kind."),
    processes: int = typer.Option(min(8, os.cpu_count() or 1), min=1, help="That compile at the same time."),
    as_json: bool = typer.Option(False, "--json", help="JSON on standard output."),
) -> None:
    """Compile a model's kernels into Triton's cache, without a GPU, so that the engine starts faster.

    They are found by the same versions of Ridgeline and Triton on any machine whose cache (TRITON_CACHE_DIR, else
    ~/.triton/cache) has the same path, as in a container's image: Triton notes its files' full paths.
    """
    config = read_config(model)
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidConfig(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}.")
    if not re.fullmatch(r"sm_[89]\d|sm_1\d\d|gfx\w+", arch):
        raise InvalidConfig(f"{arch!r} is not an architecture that kernels are made for; sm_80, sm_90 or gfx942 are.")
    if (units := multiprocessors or MULTIPROCESSORS.get(arch)) is None:
        raise InvalidConfig(f"say with --multiprocessors how many the {arch} GPU has.")
    if importlib.util.find_spec("triton") is None:
        raise InvalidConfig("compiling needs Triton, which is not installed here.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidConfig("TRITON_INTERPRET is set, which turns the compiler off; unset it.")
    started = time.perf_counter()
    sizes = Sizes(
        dtype=config.dtype if dtype == "auto" else dtype,
        max_model_len=min(max_model_len or config.spec.max_position_embeddings, config.spec.max_position_embeddings),
        max_seqs=max_num_seqs,
        max_tokens=max_num_batched_tokens,
        block_size=block_size,
    )
    work = partial(compile_part, config.spec, arch, units, sizes)
    # Forked, since nothing heavy is loaded yet, and since such processes end without what Triton says at its end
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        done = reduce(or_, pool.map(work, [part / processes for part in range(processes)]))
    seconds, fresh, found = time.perf_counter() - started, len(done.fresh), len(done.found)
    if as_json:
        counts = {"compiled": fresh, "found": found, "kernels": sorted(done.names)}
        print(json.dumps({"arch": arch, **counts, "seconds": round(seconds, 1)}))
        return
    print(f"{fresh} kernels compiled for {arch} in {seconds:.0f} s, {found} more were in the cache.")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """As the engine will be started with."""

    dtype: str
    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_size: int


def compile_part(spec: ModelSpec, arch: str, multiprocessors: int, sizes: Sizes, begin: float) -> Compiled:
    """Run every step shape once, with tensors that hold nothing, from `begin` (0 … 1 of them) round to there.

    Processes that begin apart find what the others have left in the cache, so that few kernels are compiled twice.
    """
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

    import torch  # takes seconds to import

    from ridgeline.core.cache_spec import CacheLayout
    from ridgeline.kernels.aot import compiling_for
    from ridgeline.kernels.op import Platform
    from ridgeline.kernels.ops import Ops
    from ridgeline.layers.decoder import Decoder
    from ridgeline.worker.graphs import CAPTURED_FEATURES, Buckets
    from ridgeline.worker.inputs import StepInputs
    from ridgeline.worker.runner import Runner

    meta = torch.device("meta")
    buckets = Buckets(sizes.max_seqs, sizes.max_tokens)
    uncaptured = {buckets.uncaptured(rows, sizes.max_tokens) for rows in (1, sizes.max_seqs)}
    with compiling_for(arch, multiprocessors) as done, torch.inference_mode():
        ops = Ops(Platform(device_type="cuda", arch=arch))
        decoder = Decoder(spec, ops, dtype=getattr(torch, sizes.dtype), device=meta, max_positions=sizes.max_model_len)
        layout = CacheLayout(
            groups=tuple(spec.cache_groups), block_size=sizes.block_size, dtype=sizes.dtype, num_pages=1024
        )
        runner = Runner(decoder, ops, layout, num_slots=sizes.max_seqs, max_model_len=sizes.max_model_len)
        shapes = [(shape, False) for shape in sorted(buckets.shapes | uncaptured)]
        shapes += [(shape, True) for shape in buckets.sharing]
        first = int(begin * len(shapes))
        for (rows, tokens), cascade in shapes[first:] + shapes[:first]:
            inputs = StepInputs(rows, tokens, runner.slots.dummy, meta, cascade=cascade)
            scores = runner.segments.forward(inputs)
            for features in CAPTURED_FEATURES:
                runner.segments.sample(inputs, scores, features)
    return done
