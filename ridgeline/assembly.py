"""Wires an engine to a worker: the one place that knows both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.core.config import DEFAULT_BLOCK_SIZE, EngineConfig, LLMConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.kv_format import kv_format
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
from ridgeline.perf.held import held_precision
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import Roofline
from ridgeline.quantization.experts import keeps_stacks
from ridgeline.quantization.held import keeping, runs_well
from ridgeline.quantization.scheme import Scheme, scheme
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import (
    Progress,
    check_files,
    load_weights,
    read_model_config,
    resolve_model,
    stored_forms,
)
from ridgeline.weights.quantized.plan import Forms, method_name
from ridgeline.worker.compilers import Compilers, processes_needed
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import hardware_of
from ridgeline.worker.memory import MemoryReport, check_weights_fit, plan_memory, weight_bytes
from ridgeline.worker.precompile import KernelSet
from ridgeline.worker.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A running engine and what there is to know about it. precision: with the forms in which weights are held."""

    engine: Engine
    worker: LocalWorker
    ops: Ops
    model: ModelConfig
    folder: Path
    device: torch.device
    dtype: str
    precision: Precision
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


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The decisions that are made before anything is loaded.

    why: the reason for the dtype.
    forms: the matrices that keep the form of the files.
    longest: the context that memory has room for, as far as that is known before the weights are there.
    captured: decode steps run as CUDA graphs.
    """

    config: LLMConfig
    device: torch.device
    folder: Path
    model: ModelConfig
    dtype: str
    why: str
    scheme: Scheme
    forms: Forms
    ops: Ops
    overrides: Mapping[str, str]
    max_seqs: int
    max_tokens: int
    wanted_len: int
    longest: int
    cascade: bool
    captured: bool

    def memory(self, *, weights: int, loaded: bool, longest: int) -> MemoryReport:
        """Size the KV cache for weights of so many bytes."""
        return plan_memory(
            self.model.spec,
            self.config,
            self.device,
            dtype=self.dtype,
            weights=weights,
            loaded=loaded,
            longest=longest,
            max_seqs=self.max_seqs,
            max_chunk=self.max_tokens,
        )

    @property
    def precision(self) -> Precision:
        return held_precision(precision(self.dtype), self.model.spec, self.forms)

    @property
    def kernels(self) -> KernelSet:
        """The kernels that the engine will need."""
        return KernelSet(
            spec=self.model.spec,
            arch=self.ops.platform.arch,
            multiprocessors=num_multiprocessors(self.device),
            dtype=self.dtype,
            max_model_len=self.wanted_len,
            max_seqs=self.max_seqs,
            max_tokens=self.max_tokens,
            block_size=self.config.block_size or DEFAULT_BLOCK_SIZE[self.device.type],
            cascade=self.cascade,
            overrides=tuple(sorted(self.overrides.items())),
        )


def _assemble(config: LLMConfig, device: torch.device, progress: Progress | None, interactive: bool) -> Assembly:
    choices = _choose(config, device)
    decoder, memory = _load(choices, progress)
    runner = _run_on(decoder, memory, choices, progress)
    worker = LocalWorker(runner)
    engine = _engine(worker, memory, choices, interactive=interactive)
    if choices.captured:
        engine.rehearse()
        worker.forget_expert_load()
    logger.info("computing in %s on %s: %s", choices.dtype, device, choices.why)
    return Assembly(
        engine=engine,
        worker=worker,
        ops=choices.ops,
        model=choices.model,
        folder=choices.folder,
        device=device,
        dtype=choices.dtype,
        precision=choices.precision,
        memory=memory,
    )


def _choose(config: LLMConfig, device: torch.device) -> Choices:
    """Settle everything that needs no weights. Raise InvalidConfig or ModelLoadError for what could never run."""
    platform, folder = Platform.of(device), resolve_model(config.model or EMBEDDED_MODEL, config.revision)
    weights = _scheme(config.quantization, folder)
    weights.check(platform)
    model = read_model_config(folder)
    model = replace(model, spec=model.spec.with_kv_format(kv_format(config.kv_cache_dtype)))
    dtype, why = choose_dtype(config.dtype, model.dtype, device)
    wanted_len = check_max_model_len(config.max_model_len, model.spec.max_position_embeddings)
    overrides = choose_kernels(config, device)
    ops = Ops(platform, overrides)
    if method_name(folder) is None and not is_gguf(folder):
        check_weights_fit(model.spec, device, dtype=dtype, positions=1)
    if config.load_format != "dummy":
        check_files(folder, model)
    forms = _kept(stored_forms(folder, model, files=config.load_format != "dummy"), config, folder, ops)
    check_weights_fit(model.spec, device, dtype=dtype, positions=1, forms=forms.values())
    max_seqs, max_tokens = choose_limits(config, device)
    cascade = on_gpu(platform) and not config.deterministic if config.cascade is None else config.cascade
    choices = Choices(
        config=config,
        device=device,
        folder=folder,
        model=model,
        dtype=dtype,
        why=why,
        scheme=weights,
        forms=forms,
        ops=ops,
        overrides=overrides,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        wanted_len=wanted_len,
        longest=wanted_len,
        cascade=cascade,
        captured=on_gpu(platform) and not config.enforce_eager,
    )
    item = weights.weight_bytes or DTYPE_BYTES[dtype]
    least = weight_bytes(model.spec, dtype_bytes=item, positions=1, forms=forms.values())
    longest = choices.memory(weights=least, loaded=False, longest=wanted_len).max_model_len
    check_weights_fit(model.spec, device, dtype=dtype, positions=longest, forms=forms.values())
    return replace(choices, longest=longest)


def _scheme(wanted: str | None, folder: Path) -> Scheme:
    """Return the scheme of weights that are plain numbers in the files. Raise InvalidConfig if the checkpoint is
    quantized otherwise than the user says."""
    method = method_name(folder)
    if method is None or wanted is None:
        return scheme(wanted)
    if wanted.removesuffix("_marlin") != method:  # vLLM's names of its kernels for GPTQ and AWQ
        raise InvalidConfig(
            f"quantization is {wanted!r}, and the checkpoint is quantized as {method!r}; leave quantization out."
        )
    return scheme(None)


def _kept(forms: Forms, config: LLMConfig, folder: Path, ops: Ops) -> Forms:
    """Return the modules whose weights keep the form of the files: on a GPU all, on a CPU those that it multiplies fast
    (or all, if the user names implementations). Others become plain numbers when they are loaded, as do a GGUF file's
    if they are to be rounded otherwise."""
    if config.quantization is not None and is_gguf(folder):
        return {}
    wanted = on_gpu(ops.platform) or bool(config.kernels)
    return {
        name: form
        for name, form in forms.items()
        if (wanted or runs_well(form, ops)) and (form.copies == 1 or keeps_stacks(ops, form.helds))
    }


def _load(choices: Choices, progress: Progress | None) -> tuple[Decoder, MemoryReport]:
    """Load the weights, while other processes compile kernels, and size the cache by what is left."""
    kernels, config = choices.kernels, choices.config
    with Compilers(kernels, processes_needed(kernels) if choices.captured else 0) as compilers:
        decoder = Decoder(
            choices.model.spec,
            choices.ops,
            dtype=getattr(torch, choices.dtype),
            device=choices.device,
            max_positions=choices.wanted_len,
            rotary_rows=choices.longest,
            scheme_of=keeping(choices.forms, choices.scheme),
        )
        names, form = choices.model.weights, config.load_format
        load_weights(decoder, choices.folder, names, load_format=form, seed=config.seed, progress=progress)
        decoder.prepare()
        memory = choices.memory(weights=decoder.weight_bytes, loaded=True, longest=choices.longest)
        compilers.try_to_finish(progress)
    return decoder, memory


def _run_on(decoder: Decoder, memory: MemoryReport, choices: Choices, progress: Progress | None) -> Runner:
    """Make the cache and the graphs. Raise InvalidConfig if the device has too little memory for them."""
    try:
        runner = Runner(
            decoder,
            choices.ops,
            memory.layout,
            num_slots=choices.max_seqs,
            max_model_len=memory.max_model_len,
            cascade=choices.cascade,
        )
        if choices.captured:
            runner.capture(max_rows=choices.max_seqs, max_tokens=choices.max_tokens, progress=progress)
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(
            f"{choices.device} ran out of memory while the cache and the graphs were made ({memory}); "
            "lower gpu_memory_utilization, kv_cache_memory or max_num_seqs, or set enforce_eager."
        ) from error
    return runner


def _engine(worker: LocalWorker, memory: MemoryReport, choices: Choices, *, interactive: bool) -> Engine:
    config, spec, hardware = choices.config, choices.model.spec, hardware_of(choices.device)
    cost_model = Roofline(spec, hardware, choices.precision) if hardware is not None else None
    engine_config = EngineConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=choices.max_seqs,
        max_num_batched_tokens=choices.max_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        itl_target=choose_itl_target(config.itl_target, cost_model, interactive=interactive),
        cascade=choices.cascade,
        debug_checks=config.debug_checks,
    )
    return Engine(engine_config, memory.layout, worker, vocab_size=spec.vocab_size, cost_model=cost_model)
