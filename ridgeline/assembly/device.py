"""A worker on one device: weights loaded, cache sized, graphs captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline.assembly.choices import Choices
from ridgeline.assembly.draft import load_draft
from ridgeline.assembly.foreign import capture, check_agrees
from ridgeline.assembly.loading import LoadingWeights, loads_beside
from ridgeline.core.cores import Load
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.numa import bind
from ridgeline.core.settings.adapters import gguf_adapter
from ridgeline.core.specs.host_layout import HostLayout, staging_bytes
from ridgeline.core.specs.state import DTYPE_BYTES
from ridgeline.core.timeline import now
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.context import link_between, pays_from
from ridgeline.perf.links import load_links
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.streamed import LayersBelow
from ridgeline.quantization.held import keeping
from ridgeline.weights.adapters.gguf import read_gguf_adapter
from ridgeline.weights.adapters.places import (
    ENCODERS,
    HEAD,
    encoder_places,
    expert_places,
    foreign_places,
    places_in,
    unused_of,
    vocabulary_places,
    with_head,
)
from ridgeline.weights.adapters.reader import WIDEST, EncoderPlaces, ReadAdapter, read_adapter
from ridgeline.weights.adapters.shares import AdapterShares
from ridgeline.weights.loader import Progress, empty_decoder, load_weights
from ridgeline.worker.adapters.magnitudes import with_factors
from ridgeline.worker.adapters.store import AdapterStore, HostBounds
from ridgeline.worker.adapters.tables import AdapterTables, maps_of
from ridgeline.worker.adapters.vocabulary import VocabularyTensors
from ridgeline.worker.adapters.whole import WholeTensors
from ridgeline.worker.compilers import Compilers, processes_needed
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import device_name, hardware_of, pci_address
from ridgeline.worker.memory import MemoryReport
from ridgeline.worker.received import ReceivedWeights
from ridgeline.worker.runner import Runner
from ridgeline.worker.sleep import SleepMemory
from ridgeline.worker.speculation.methods import DraftSource, Network, network_of
from ridgeline.worker.threads import Threads

UNMEASURED = 512  # tokens of a step that ranks divide where nothing is known of the device


class HeldAdapters(NamedTuple):
    """The adapters in the host's memory, and their places on the device."""

    store: AdapterStore
    tables: AdapterTables


class DeviceExtras(NamedTuple):
    """All that runs beside the model: a network that drafts, and adapters."""

    draft: Network | None
    adapters: HeldAdapters | None


def device_worker(choices: Choices, progress: Progress | None) -> tuple[LocalWorker, MemoryReport]:
    """Return the worker of one device, and what its memory holds. Raise InvalidConfig or ModelLoadError."""
    wanted = choices.config.enable_sleep_mode and choices.device.type == "cuda"
    graphs = choices.config.sleep_mode_offload_cudagraph
    sleep = SleepMemory(choices.device, graphs=graphs) if wanted else None
    if choices.config.numa_bind and choices.device.type == "cuda":
        bind(pci_address(choices.device))  # before weights are read into the host's memory
    if choices.device.type != "cpu":
        from ridgeline.worker.kernel_cache import keep_without_room  # here, because it needs Triton

        ahead = choices.config.kernel_cache
        keep_without_room(None if ahead is None else Path(ahead))
    load = Load()  # while weights are read, it is seen how busy the cores are
    beside: list[LoadingWeights] = []
    try:
        decoder, draft, adapters, memory = _load(choices, progress, beside, sleep)
        runner = _run_on(decoder, DeviceExtras(draft, adapters), memory, choices, progress, sleep)
    except BaseException:
        for loading in beside:
            loading.stop()
        raise
    alone = choices.device.type == "cpu" and choices.mesh.size == 1  # ranks must find the same bits
    alone = alone and not choices.config.deterministic
    threads = Threads.where_they_may_change(load) if alone else None
    return LocalWorker(runner, choices.mesh.stamps, threads, beside[0] if beside else None), memory


def _load(
    choices: Choices, progress: Progress | None, beside: list[LoadingWeights], sleep: SleepMemory | None = None
) -> tuple[Decoder, Network | None, HeldAdapters | None, MemoryReport]:
    """Load the weights of the model, and of the one that drafts if there is one, while other processes compile kernels,
    make room for adapters, and size the cache by what is left. beside: gets the thread that loads, if one does."""
    kernels, config, timeline = choices.kernels, choices.config, choices.timeline
    known = not choices.captured or choices.model.foreign is None  # others' kernels are known once they are loaded
    processes = processes_needed(kernels, config.kernel_cache) if choices.captured and known else 0
    with Compilers(kernels, processes, early=choices.early if known else None) as compilers:
        begin = now()
        with nullcontext() if sleep is None else sleep.holding("weights"):
            decoder = _decoder(choices)
            beside += _load_model(decoder, choices, progress, begin)
            if isinstance(decoder, ForeignDecoder):
                _compile(decoder, choices, progress)
                check_agrees(decoder)
            draft = _draft_of(choices, decoder, progress)
            adapters = _adapters_of(choices, decoder)
        if not beside:
            timeline.note("weights", begin)
        weights = decoder.weight_bytes + (0 if draft is None else draft.weight_bytes)
        weights += 0 if adapters is None else adapters.tables.nbytes
        memory = choices.memory(weights=weights, loaded=True, longest=choices.longest)
        with timeline.stage("compile"):
            compilers.try_to_finish(progress)
    return decoder, draft, adapters, _agreed(memory, choices.mesh)


def _load_model(
    decoder: Decoder, choices: Choices, progress: Progress | None, begin: float
) -> Iterator[LoadingWeights]:
    """Load the network's weights and prepare it, or prepare it and yield the thread that loads them. begin: of the
    stage."""
    config, device = choices.config, choices.device
    source = partial(load_weights, decoder, choices.folder, choices.model.weights)
    load = partial(source, load_format=config.load_format, seed=config.seed)
    if not loads_beside(choices, decoder):
        load(progress=progress)
        decoder.prepare()
        return
    decoder.prepare()
    for parameter in decoder.parameters():
        parameter.zero_()  # steps that run before the weights are there must find numbers
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

    def load_beside(tell: Progress) -> None:
        with on_device(device):
            load(progress=tell)
        choices.timeline.note("weights", begin)

    yield LoadingWeights(load_beside, progress)


def _compile(decoder: ForeignDecoder, choices: Choices, progress: Progress | None) -> None:
    """Compile the kernels of a class's modules and of the ops in their place."""
    if choices.captured:
        kernels = replace(choices.kernels, recipe=decoder.recipe)
        processes = processes_needed(kernels, choices.config.kernel_cache)
        with Compilers(kernels, processes, early=choices.early) as compilers:
            compilers.try_to_finish(progress)


def _adapters_of(choices: Choices, decoder: Decoder) -> HeldAdapters | None:
    """Return the memory of adapters on the device and in the host's memory, or None without adapters."""
    config = choices.config
    if not config.enable_lora:
        return None
    model, rank, mesh = choices.model, config.max_lora_rank, decoder.mesh
    factors, weights = config.enable_lora_factors, with_head(model.weights)
    whole = decoder if isinstance(decoder, ForeignDecoder) else empty_decoder(model.spec)
    places = foreign_places(decoder) if isinstance(decoder, ForeignDecoder) else places_in(whole, model.weights)
    encoders, vocabulary = encoder_places(whole, model.weights), vocabulary_places(whole, weights)
    of_encoders = EncoderPlaces(encoders, (), {} if config.enable_lora_vocabulary else vocabulary)
    if config.enable_tower_connector_lora and encoders:
        places |= encoders
        of_encoders = of_encoders._replace(closed={}, unused=unused_of(encoders, model.spec.unused))
    if config.enable_lora_vocabulary:
        places |= vocabulary
    if config.enable_lora_experts:
        places |= expert_places(whole, model.weights)
    heads = places_in(whole, model.weights, HEAD)
    most = sum(each.outputs for each in places.values()) if factors else 0
    most += sum(each.numel() for name, each in whole.named_parameters() if name.startswith(HEAD))
    if config.enable_lora_vocabulary:
        most += sum(each.map.inputs * each.outputs for each in vocabulary.values())
    kept = WholeTensors(decoder, model.weights, factors=factors)
    kinds = {name: each for name, each in places.items() if not each.map.name.startswith(ENCODERS)}
    shares = AdapterShares(decoder, weights, kinds) if mesh.tp.size * mesh.pp.size > 1 else None
    own = places if shares is None else shares.own
    known = vocabulary if config.enable_lora_vocabulary else {}
    tables_of = VocabularyTensors(decoder, known, own, rank, tables=config.enable_lora_tables)

    locked = choices.device.type == "cuda"

    def read(folder: Path, known: str | None) -> ReadAdapter:
        if (file := gguf_adapter(folder)) is not None:
            found = read_gguf_adapter(file, whole, model.weights, places, most_rank=rank, dtype=decoder.dtype)
        else:
            how: dict[str, Any] = {"factors": factors, "encoders": of_encoders, "page_locked": locked, "known": known}
            how |= {"most_rank": rank, "most_replaced": most * WIDEST}
            found = read_adapter(folder, places | heads, dtype=decoder.dtype, **how)
        found = kept.settled(tables_of.settled(found if shares is None else shares.of(found)))
        found = with_factors(found, decoder)
        return found.pinned() if locked else found

    most_bytes = config.max_cpu_lora_bytes
    bounds = HostBounds(config.max_cpu_loras, None if most_bytes is None else most_bytes // mesh.size)
    maps = maps_of(own)
    if shares is not None and config.enable_tower_connector_lora and shares.sees:
        maps += maps_of(encoders)
    tables = AdapterTables(decoder, maps, config.max_loras, tables_of.most_rank, factors=factors)
    return HeldAdapters(AdapterStore(read, bounds, mesh), tables)


def _decoder(choices: Choices) -> Decoder:
    """Return the model's network, without weights."""
    dtype = getattr(torch, choices.dtype)
    if choices.model.foreign is not None:
        return ForeignDecoder(
            choices.model.foreign, choices.model.spec, choices.ops, dtype=dtype, device=choices.device
        )
    below = choices.below if isinstance(choices.below, LayersBelow) else None
    return Decoder(
        choices.model.spec,
        choices.ops,
        dtype=dtype,
        device=choices.device,
        max_positions=choices.wanted_len,
        rotary_rows=choices.longest,
        scheme_of=keeping(choices.forms, choices.scheme),
        mesh=choices.mesh,
        expert_cache=choices.expert_slots,
        below=() if below is None else below.layers,
        waiting=None if below is None else below.modules,
        buffers=2 if below is None else below.buffers[0],
        senses=None if choices.senses is None else (choices.senses, _ops_of_senses(choices, choices.senses)),
    )


def _ops_of_senses(choices: Choices, device: torch.device) -> Ops:
    """Return the ops of a tower or a listener on this device, by the names that the user gave if it is of the model's
    kind."""
    return Ops(Platform.of(device), choices.overrides if device.type == choices.device.type else {})


def _draft_of(choices: Choices, target: Decoder, progress: Progress | None) -> Network | None:
    """Return the network that drafts, or None if none does."""
    choice, config = choices.draft, choices.config
    if choice is None:
        return None
    network = network_of(
        choice.network,
        target,
        choices.ops,
        dtype=getattr(torch, choices.dtype),
        device=choices.device,
        positions=choices.wanted_len,
        rotary_rows=choices.longest + config.num_drafts,  # a pass of rows of unlike lengths reaches behind some
        scheme_of=keeping(choice.forms, choice.scheme),
    )
    load_draft(network, choice, load_format=config.load_format, seed=config.seed, progress=progress)
    return network


def _agreed(memory: MemoryReport, ranks: Mesh) -> MemoryReport:
    """Return the report with the cache that every rank has room for: one plan names blocks of all of them."""
    if ranks.size == 1:
        return memory
    pages, longest = ranks.smallest(memory.layout.num_pages), ranks.smallest(memory.max_model_len)
    layout = replace(memory.layout, num_pages=pages)
    return replace(memory, layout=layout, kv_cache=pages * layout.page_bytes, max_model_len=longest)


def _run_on(
    decoder: Decoder,
    beside: DeviceExtras,
    memory: MemoryReport,
    choices: Choices,
    progress: Progress | None,
    sleep: SleepMemory | None = None,
) -> Runner:
    """Make the cache and the graphs. Raise InvalidConfig if the device has too little memory for them."""
    speculation = choices.config.speculation
    try:
        with choices.timeline.stage("cache"):
            runner = Runner(
                decoder,
                memory.layout,
                num_slots=choices.max_seqs,
                max_model_len=memory.max_model_len,
                cascade=choices.cascade,
                divide_from=_divide_from(choices),
                sleep=sleep,
                drafts=None if speculation is None else DraftSource(speculation, beside.draft),
            )
        runner.received = ReceivedWeights(decoder, choices.model.weights, choices.device)
        if beside.adapters is not None:
            runner.adapt(*beside.adapters)
        if host_bytes := choices.config.host_bytes:
            below = HostLayout.within(memory.layout, host_bytes // choices.config.ranks)
            staged = staging_bytes(memory.layout.groups, memory.layout.dtype, choices.max_tokens)
            shared = choices.config.kv_disk is not None and choices.config.ranks > 1
            runner.keep_below(below, staged, shared=shared)
        if choices.captured:
            sizes = {"max_rows": choices.max_seqs, "max_tokens": choices.max_tokens}
            capture_all = partial(runner.capture, **sizes, progress=progress, later=choices.captures_later)
            with choices.timeline.stage("capture"):
                if choices.captures_later:  # the memory that steps and graphs will take must be there, and stays ours
                    torch.empty(memory.activations, dtype=torch.uint8, device=choices.device)
                if isinstance(decoder, ForeignDecoder):
                    capture(decoder, capture_all)
                else:
                    capture_all()
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(
            f"{choices.device} ran out of memory while the cache and the graphs were made ({memory}); "
            "lower gpu_memory_utilization, kv_cache_memory or max_num_seqs, or set enforce_eager."
        ) from error
    return runner


def _divide_from(choices: Choices) -> int | None:
    """Return the least number of tokens in a step that ranks divide, or None if there are no such ranks. All ranks
    come to the same, whatever each has measured."""
    ring, device = choices.mesh.cp, choices.device
    if ring.size == 1:
        return None
    if choices.config.prefill_context_parallel_threshold is not None:
        return choices.config.prefill_context_parallel_threshold
    hardware, tokens = hardware_of(device), UNMEASURED
    if hardware is not None:
        step_limit = Roofline(choices.part, hardware, choices.precision).step_limit
        item = DTYPE_BYTES[choices.dtype]
        link = link_between(load_links(device_name(device)), ring.size, device.type)
        tokens = pays_from(choices.part, ring.size, step_limit, device.type, item, link)
    return ring.smallest(tokens)
