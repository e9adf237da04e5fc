"""`ridgeline compile`: compile a model's GPU kernels before they are needed, on any machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.options import json_object, with_records
from ridgeline.cli.sizes import config_path, read_config
from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.model import DTYPES
from ridgeline.core.settings.speculation import BARE
from ridgeline.core.settings.steps import DEFAULT_LIMITS, LARGE_STEP

MULTIPROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
# most GPUs of these kinds have the memory for the engine's largest steps
LARGE = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class EngineFlags:
    """Values that the engine will be started with."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    max_model_len: Annotated[int | None, typer.Option(help="Value that the engine will be started with.")] = None
    max_num_seqs: Annotated[int, typer.Option(help="Value that the engine will be started with.")] = 256
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Value that the engine will be started with; default: its own.")
    ] = None
    block_size: Annotated[int, typer.Option(help="Value that the engine will be started with.")] = DEFAULT_BLOCK_SIZE[
        "cuda"
    ]
    deterministic: Annotated[bool, typer.Option(help="Value that the engine will be started with.")] = False
    speculative_config: Annotated[str, typer.Option(help="Value that the engine will be started with, as JSON.")] = ""


@with_records
def compile(
    model: Annotated[str, typer.Argument(help="Folder, config.json or hub id. Weights are not needed.")],
    arch: Annotated[str, typer.Option("--arch", help="Architecture to compile for, such as sm_90 or gfx942.")],
    *,
    engine: EngineFlags,
    multiprocessors: Annotated[
        int | None, typer.Option(help="Multiprocessors of the GPU (default: of the largest common one of its kind).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that compile at the same time.")] = min(
        8, available()
    ),
    cache: Annotated[
        Path | None, typer.Option(help="Folder to fill, for --kernel-cache (default: Triton's own cache).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Compile a model's kernels, without a GPU, so that the engine starts faster.

    An engine of the same versions of Ridgeline and Triton finds them in its own cache (TRITON_CACHE_DIR, else
    ~/.triton/cache), or in the folder that --kernel-cache names, wherever that was filled.
    """
    config, drafts = read_config(model), json_object(engine.speculative_config, "--speculative-config")
    dtype, deterministic = engine.dtype, engine.deterministic
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
    from ridgeline.assembly.choices import check_speculation
    from ridgeline.assembly.draft import choose_draft, draft_folder
    from ridgeline.kernels.base.op import Platform
    from ridgeline.kernels.ops import DETERMINISTIC, Ops
    from ridgeline.quantization.scheme import scheme
    from ridgeline.worker.compilers import Compilers
    from ridgeline.worker.precompile import KernelSet

    started, longest = time.perf_counter(), config.spec.max_position_embeddings
    longest = min(engine.max_model_len or longest, longest)
    asked = LLMConfig(speculative_config=drafts or None)
    draft, speculation = None, asked.speculation
    if speculation is not None:
        check_speculation(config.spec, speculation)
    if speculation is not None and speculation.method not in BARE:
        target = config_path(model).parent
        if not any(draft_folder(speculation, asked, target).glob("*.safetensors")):
            asked = replace(asked, load_format="dummy")  # so that no weights are asked for
        ops = Ops(Platform(device_type="cuda", arch=arch))
        draft = choose_draft(asked, target, config.spec, ops, scheme(None), longest)
    kernels = KernelSet(
        spec=config.spec,
        arch=arch,
        multiprocessors=units,
        dtype=config.dtype if dtype == "auto" else dtype,
        max_model_len=longest,
        max_seqs=engine.max_num_seqs,
        max_tokens=engine.max_num_batched_tokens or (LARGE_STEP if arch in LARGE else DEFAULT_LIMITS["cuda"][1]),
        block_size=engine.block_size,
        cascade=not deterministic,
        overrides=tuple(sorted(DETERMINISTIC.items())) if deterministic else (),
        speculation=speculation,
        draft=None if draft is None else draft.network,
        draft_forms=() if draft is None else tuple(sorted(draft.forms.items())),
    )
    with Compilers(kernels, processes, None if cache is None else cache.resolve()) as compilers:
        done = compilers.finish()
    seconds, fresh, found = time.perf_counter() - started, len(done.fresh), len(done.found)
    if as_json:
        counts = {"compiled": fresh, "found": found, "kernels": sorted(done.names)}
        print(json.dumps({"arch": arch, **counts, "seconds": round(seconds, 1)}))
        return
    print(f"{fresh} kernels compiled for {arch} in {seconds:.0f} s, {found} more were in the cache.")
