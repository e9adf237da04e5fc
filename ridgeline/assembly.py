"""Wires an engine to a worker: the one place that knows both."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ridgeline.core.config import DEFAULT_BLOCK_SIZE, EngineConfig, LLMConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.state_spec import DTYPE_BYTES
from ridgeline.defaults import (
    check_max_model_len,
    choose_device,
    choose_dtype,
    choose_itl_target,
    choose_kernels,
    choose_limits,
)
from ridgeline.engine.engine import Engine
from ridgeline.kernels.launch import num_multiprocessors, on_device
from ridgeline.kernels.op import Platform, on_gpu
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.perf.roofline import Roofline
from ridgeline.quantization.scheme import everywhere, scheme
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import Progress, check_files, load_weights, read_model_config, resolve_model
from ridgeline.worker.compilers import Compilers, processes_needed
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import hardware_of
from ridgeline.worker.memory import MemoryReport, check_weights_fit, plan_memory, weight_bytes
from ridgeline.worker.precompile import KernelSet
from ridgeline.worker.runner import Runner

logger = logging.getLogger(__name__)


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
    weights = scheme(config.quantization)
    weights.check(Platform.of(device))
    folder = resolve_model(config.model or EMBEDDED_MODEL, config.revision)
    model = read_model_config(folder)
    dtype, why = choose_dtype(config.dtype, model.dtype, device)
    wanted_len = check_max_model_len(config.max_model_len, model.spec.max_position_embeddings)
    check_weights_fit(model.spec, device, dtype=dtype, positions=1)
    if config.load_format != "dummy":
        check_files(folder, model)
    max_seqs, max_tokens = choose_limits(config, device)
    memory_for = partial(plan_memory, model.spec, config, device, dtype=dtype, max_seqs=max_seqs, max_chunk=max_tokens)
    least = weight_bytes(model.spec, dtype_bytes=weights.weight_bytes or DTYPE_BYTES[dtype], positions=1)
    longest = memory_for(weights=least, loaded=False, longest=wanted_len).max_model_len
    check_weights_fit(model.spec, device, dtype=dtype, positions=longest)
    overrides = choose_kernels(config, device)
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
            scheme_of=everywhere(weights),
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
