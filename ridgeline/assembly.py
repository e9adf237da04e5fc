"""Wires an engine to a worker: the one place that knows both."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.core.cache_spec import DTYPE_BYTES
from ridgeline.core.config import DEFAULT_BLOCK_SIZE, EngineConfig, LLMConfig
from ridgeline.core.cost import CostModel, StepShape
from ridgeline.core.errors import InvalidConfig
from ridgeline.engine.engine import Engine
from ridgeline.kernels.gemm.prepared import has_vnni
from ridgeline.kernels.launch import num_multiprocessors, on_device
from ridgeline.kernels.op import Platform, on_gpu
from ridgeline.kernels.ops import DETERMINISTIC, Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.perf.roofline import Roofline
from ridgeline.weights.folder import EMBEDDED_MODEL as EMBEDDED_MODEL
from ridgeline.weights.loader import Progress, check_files, load_weights, read_model_config, resolve_model
from ridgeline.worker.compilers import Compilers, processes_needed
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import hardware_of
from ridgeline.worker.memory import MemoryReport, check_weights_fit, plan_memory, weight_bytes
from ridgeline.worker.precompile import KernelSet
from ridgeline.worker.runner import Runner

logger = logging.getLogger(__name__)

# (requests at once, tokens per step) unless the user says otherwise
DEFAULT_LIMITS = {"cuda": (256, 8192), "cpu": (32, 512)}
LARGE_GPU = 70 << 30  # bytes of memory from which a step takes LARGE_STEP tokens: their products run a little faster
LARGE_STEP = 16_384
# A server's steps with prompts last so many times as long as reading the weights once, or so many seconds if that is
# more. Fewer would run prompts below the rate of a large step; more, and who decodes waits longer for nothing.
ITL_READS, LEAST_ITL = 6, 0.010


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A running engine and what there is to know about it."""

    engine: Engine
    worker: LocalWorker
    model: ModelConfig
    folder: Path
    device: torch.device
    dtype: str
    memory: MemoryReport


class DtypeChoice(NamedTuple):
    """The type that weights and activations are held in, and why."""

    name: str
    why: str


def assemble(config: LLMConfig, progress: Progress | None = None, *, interactive: bool = False) -> Assembly:
    """Load the model, size the cache, start the worker. Raises InvalidConfig or ModelLoadError.

    interactive: somebody reads along, so a prompt must not hold up those who decode (`LLMConfig.itl_target`).

    For a CPU a thread does it that then ends. The threads with which OpenMP shares its loops end with it, and only the
    worker's are left: were there more threads than cores, each would go to sleep after every loop instead of looking
    out for the next (libgomp's rule), which makes a step of a small model 10 to 20 % longer.
    """
    device = choose_device(config.device)
    if device.type != "cpu":
        if ":" not in str(device):  # a number, so that every thread means the same one
            device = torch.device(device.type, torch.cuda.current_device())
        with on_device(device):  # Triton launches on the thread's current device, which may be another
            return _assemble(config, device, progress, interactive)
    with ThreadPoolExecutor(1, "ridgeline-load") as thread:
        return thread.submit(_assemble, config, device, progress, interactive).result()


def _assemble(config: LLMConfig, device: torch.device, progress: Progress | None, interactive: bool) -> Assembly:
    folder = resolve_model(config.model or EMBEDDED_MODEL, config.revision)
    model = read_model_config(folder)
    dtype, why = choose_dtype(config.dtype, model.dtype, device)
    wanted_len = check_max_model_len(config.max_model_len, model.spec.max_position_embeddings)
    check_weights_fit(model.spec, device, dtype=dtype, positions=1)
    if config.load_format != "dummy":
        check_files(folder, model)
    max_seqs, max_tokens = _limits(config, device)
    memory_for = partial(plan_memory, model.spec, config, device, dtype=dtype, max_seqs=max_seqs, max_chunk=max_tokens)
    least = weight_bytes(model.spec, dtype_bytes=1 if config.quantization else DTYPE_BYTES[dtype], positions=1)
    longest = memory_for(weights=least, loaded=False, longest=wanted_len).max_model_len
    check_weights_fit(model.spec, device, dtype=dtype, positions=longest)
    overrides = _kernels(config, device)
    ops = Ops(Platform.of(device), overrides)
    cascade = on_gpu(ops.platform) and not config.deterministic if config.cascade is None else config.cascade
    captured = on_gpu(ops.platform) and not config.enforce_eager
    kernels = KernelSet(
        spec=model.spec,
        arch=ops.platform.arch,
        multiprocessors=num_multiprocessors(device),
        dtype=dtype,
        max_model_len=wanted_len,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE[device.type],
        cascade=cascade,
        overrides=tuple(sorted(overrides.items())),
    )
    with Compilers(kernels, processes_needed(kernels) if captured else 0) as compilers:
        decoder = Decoder(
            model.spec,
            ops,
            dtype=getattr(torch, dtype),
            device=device,
            max_positions=wanted_len,
            rotary_rows=longest,
        )
        load_weights(
            decoder, folder, model.weights, load_format=config.load_format, seed=config.seed, progress=progress
        )
        decoder.prepare()
        memory = memory_for(weights=decoder.weight_bytes, loaded=True, longest=longest)
        compilers.try_to_finish(progress)
    try:
        runner = Runner(
            decoder,
            ops,
            memory.layout,
            num_slots=max_seqs,
            max_model_len=memory.max_model_len,
            cascade=cascade,
        )
        if captured:
            runner.capture(max_rows=max_seqs, max_tokens=max_tokens, progress=progress)
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(
            f"{device} ran out of memory while the cache and the graphs were made ({memory}); "
            "lower gpu_memory_utilization, kv_cache_memory or max_num_seqs, or set enforce_eager."
        ) from error
    hardware = hardware_of(device)
    cost_model = Roofline(model.spec, hardware, dtype) if hardware is not None else None
    engine_config = EngineConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        itl_target=choose_itl_target(config.itl_target, cost_model, interactive=interactive),
        cascade=cascade,
        debug_checks=config.debug_checks,
    )
    worker = LocalWorker(runner)
    engine = Engine(
        engine_config,
        memory.layout,
        worker,
        vocab_size=model.spec.vocab_size,
        cost_model=cost_model,
    )
    if captured:
        engine.rehearse()
    logger.info("computing in %s on %s: %s", dtype, device, why)
    return Assembly(engine=engine, worker=worker, model=model, folder=folder, device=device, dtype=dtype, memory=memory)


def _kernels(config: LLMConfig, device: torch.device) -> dict[str, str]:
    """Op → implementation where it is not the platform's first. Raises InvalidConfig where there is no such."""
    if config.deterministic and device.type != "cuda":
        raise InvalidConfig(f"deterministic needs a GPU's kernels, and the device is {device}; leave it out.")
    if config.quantization and device.type != "cpu":
        raise InvalidConfig(f"quantization {config.quantization} runs on a CPU only, and the device is {device}.")
    if config.quantization == "w8a8" and not has_vnni():
        raise InvalidConfig("quantization w8a8 needs a CPU with VNNI, which this one has not; use int8.")
    quantized = dict.fromkeys(("linear", "norm_linear"), config.quantization) if config.quantization else {}
    return {**(DETERMINISTIC if config.deterministic else {}), **quantized, **config.kernels}


def choose_device(wanted: str) -> torch.device:
    """ "auto" takes a GPU when there is one. Raises InvalidConfig for devices that are not here."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(wanted).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InvalidConfig(f"unknown device {wanted!r}; use auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"device {wanted!r} was asked for, but torch {torch.__version__} sees no GPU; use cpu.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"device {wanted!r} was asked for, but there are {torch.cuda.device_count()} GPUs.")
    return torch.device(wanted)


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> DtypeChoice:
    """ "auto" is the checkpoint's own type, but float32 on a CPU without bfloat16 instructions (far faster there)."""
    if wanted != "auto":
        return DtypeChoice(wanted, "it was asked for")
    if device.type == "cpu" and checkpoint != "float32" and not torch.cpu._is_avx512_bf16_supported():
        return DtypeChoice(
            "float32",
            f"this CPU has no instructions for bfloat16, without which the checkpoint's {checkpoint} is far slower",
        )
    return DtypeChoice(checkpoint, "the checkpoint's own")


def choose_itl_target(wanted: float | None, cost_model: CostModel | None, *, interactive: bool) -> float | None:
    """Seconds; None: no bound. wanted: milliseconds, 0 for any, None for what suits the model and the device."""
    if wanted is not None:
        return wanted / 1000 or None
    if not interactive or cost_model is None:
        return None
    return max(LEAST_ITL, ITL_READS * cost_model.step_limit(StepShape([1], [1], 1)))


def check_max_model_len(wanted: int | None, model_maximum: int) -> int:
    """The context to build for. Raises InvalidConfig beyond what the model's positions cover."""
    if wanted is not None and wanted > model_maximum:
        raise InvalidConfig(
            f"max_model_len {wanted} is more than the model's own maximum of {model_maximum} positions."
        )
    return wanted or model_maximum


def _limits(config: LLMConfig, device: torch.device) -> tuple[int, int]:
    seqs, tokens = DEFAULT_LIMITS[device.type]
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU:
        tokens = LARGE_STEP
    max_seqs = config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs)
    return max_seqs, config.max_num_batched_tokens or max(tokens, max_seqs)
