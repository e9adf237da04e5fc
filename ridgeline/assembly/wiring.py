"""An engine with its worker: one device in this process, or a group of ranks in processes of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ridgeline.assembly.choices import check_speculation, choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.disk import keep_on_disk
from ridgeline.assembly.draft import DraftChoice, HeadChoice, choose_draft, folders_read
from ridgeline.assembly.foreign import check_foreign
from ridgeline.assembly.kv_events import check_events, tell_events
from ridgeline.assembly.placement import placement_of
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.plan.stages import deal, stage_of
from ridgeline.core.plan.worker import Worker
from ridgeline.core.settings.config import EngineConfig, LLMConfig
from ridgeline.core.settings.host_tier import HostTierSettings, SessionBounds
from ridgeline.core.settings.speculation import NAMED
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.host_layout import HostLayout, staging_bytes
from ridgeline.core.specs.model import NO_RULES, ModelSpec, OutputRules, attention_of, with_draft
from ridgeline.core.specs.state import DTYPE_BYTES, WINDOW_CHUNK
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.core.timeline import Timeline
from ridgeline.defaults import check_divided, check_max_model_len, choose_device, device_of_rank
from ridgeline.engine.engine import Engine
from ridgeline.engine.itl import choose_itl_target
from ridgeline.engine.protocol import RunsRequests
from ridgeline.engine.side_by_side import Engines
from ridgeline.kernels.base.cost import CostModel, StepShape
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.models.config import ModelConfig
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.footprint import active_parameters
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.streamed import LayersBelow, StreamedCost, WeightsBelow
from ridgeline.quantization.scheme import scheme
from ridgeline.weights.folder import EMBEDDED_MODEL, fingerprint
from ridgeline.weights.loader import Progress, described, resolve_model, with_cache
from ridgeline.worker.early import Early
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import hardware_named, hardware_of
from ridgeline.worker.memory import MemoryReport, host_memory
from ridgeline.worker.pictures import bytes_kept, patches_at_once, vector_bytes

if TYPE_CHECKING:
    from ridgeline.ranks.leader import Group
    from ridgeline.ranks.recruits import Recruits

logger = logging.getLogger(__name__)

PATHS = ("tokenizer", "download_dir", "kv_disk")  # settings that ranks get as text
RANK_BYTES = 128 << 20  # of a process that has imported torch and loaded nothing
# B/s from the host's memory to ranks that are not asked: PCIe 4 with 16 lanes, the share of a stated rate that copies
# attain, and a copy inside of a CPU's memory
MEMORY_RATE = 4e9
# Operations of products that take as long as a pixel takes to be copied and resized: 0.2 ns of an H200, 10 ns of a CPU
PIXEL_FLOPS = {"cuda": 100_000, "cpu": 1000}


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A running engine and what there is to know about it. Of several ranks, memory and device are the first one's.

    precision: with the forms in which weights are held.
    timeline: the stages of the start.
    """

    engine: RunsRequests
    worker: LocalWorker | Group
    ops: Ops
    model: ModelConfig
    folder: Path
    device: torch.device
    dtype: str
    precision: Precision
    memory: MemoryReport
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def local(self) -> LocalWorker:
        """The worker, for callers that look into it. Raise InvalidConfig if it is in other processes."""
        if not isinstance(self.worker, LocalWorker):
            raise InvalidConfig("this looks into the worker, which several ranks are; run it on one device.")
        return self.worker


def assemble(
    config: LLMConfig,
    progress: Progress | None = None,
    *,
    interactive: bool = False,
    recruits: Recruits | None = None,
    timeline: Timeline | None = None,
    early: Early | None = None,
) -> Assembly:
    """Load the model, size the cache, start the worker. Raises InvalidConfig or ModelLoadError.

    interactive: clients read along, so a prompt must not hold up the requests that decode (`LLMConfig.itl_target`).
    recruits: processes for the model's ranks that were started already.
    timeline: of the start so far. early: what was begun beside it.

    For a CPU a thread does it that then ends. The threads with which OpenMP shares its loops end with it, and only the
    worker's are left: were there more threads than cores, each would go to sleep after every loop instead of looking
    out for the next (libgomp's rule), which makes a step of a small model 10 to 20 % longer.
    """
    check_events(config)
    timeline = timeline or Timeline()
    if config.host_bytes > (free := host_memory()):
        raise InvalidConfig(
            f"kv_offloading_size is {config.kv_offloading_size:g} GiB, and {free / (1 << 30):.1f} GiB of the host's "
            "memory are free; lower it."
        )
    if config.ranks > 1:
        with timeline.stage("ranks"):
            assembly = _assemble_group(config, progress, interactive, recruits)
        return replace(assembly, timeline=timeline)
    with timeline.stage("context"):
        if early is not None and early.on_gpu:  # meanwhile the context is made
            find_spec("triton") and import_module("triton")
        device = choose_device(config.device)
        if device.type != "cpu" and ":" not in str(device):  # a number, so that every thread means the same one
            device = torch.device(device.type, torch.cuda.current_device())
    if device.type != "cpu":
        with on_device(device):  # Triton launches on the thread's current device, which may be another
            return _assemble(config, device, progress, interactive, timeline, early)
    with ThreadPoolExecutor(1, "ridgeline-load") as thread:
        return thread.submit(_assemble, config, device, progress, interactive, timeline).result()


def _assemble(
    config: LLMConfig,
    device: torch.device,
    progress: Progress | None,
    interactive: bool,
    timeline: Timeline,
    early: Early | None = None,
) -> Assembly:
    with timeline.stage("settings"):
        choices = replace(choose(config, device), timeline=timeline, early=early)
    if config.enable_expert_parallel:
        logger.info("enable_expert_parallel divides nothing: one device computes all experts")
    worker, memory = device_worker(choices, progress)
    with _loading_ends(worker, timeline):
        hardware, spec = hardware_of(device), choices.model.spec
        cost_model: CostModel | None = Roofline(spec, hardware, choices.precision) if hardware is not None else None
        if choices.below is not None:
            cost_model = _with_copies(
                cost_model, choices.below, worker.runner.decoder.bytes_per_second(), choices.max_seqs
            )
        pools, on_gpu = spec.pooling is not None, device.type == "cuda"
        wiring = Wiring(
            memory,
            spec.vocab_size,
            choices.max_seqs,
            choices.cascade,
            cost_model,
            interactive,
            pools,
            on_gpu,
            spec.encoder,
            spec.output_rules,
            model=spec,
        )
        if (host := worker.runner.host) is not None:
            wiring = wiring._replace(host_tier=_host_tier(config, memory, host.bytes_per_second()))
        engine = _engine(config, worker, wiring)
        if choices.captured or (pools and on_gpu and not spec.senses_only):  # a tower alone runs no tokens
            with timeline.stage("rehearsal"):
                engine.rehearse()
                worker.forget_expert_load()
    tell_events(config, [engine])
    keep_on_disk(config, engine, choices.folder, device.type)
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
        timeline=timeline,
    )


@contextmanager
def _loading_ends(worker: LocalWorker, timeline: Timeline) -> Iterator[None]:
    """Run the body beside the loading of weights, if that goes on, and wait for the rest of it. If either fails, stop
    the other, and let go of the device's memory, in which there is a cache already: a caller may try another model."""
    try:
        yield
        with timeline.stage("weights left"):
            worker.finish_loading()
    except BaseException:
        worker.stop_loading()
        worker.shutdown()
        raise


def _with_copies(computing: CostModel | None, below: WeightsBelow, rate: float, rows: int) -> CostModel | None:
    """Return the cost of steps whose weights come at so many bytes a second, and log that of a step of so many rows.
    computing: the cost with all weights on the device; None: it is not known."""
    shape = StepShape([1] * rows, [1] * rows, rows)
    alone = 0.0 if computing is None else computing.step_limit(shape)
    logger.info(
        "%.2f GiB of %s wait in the host's memory and come at %.1f GB/s: a step of %d requests takes %.3g ms or longer",
        *(below.num_bytes / (1 << 30), below.what, rate / 1e9, rows, 1e3 * below.seconds(alone, rows, rate)),
    )
    return None if computing is None else StreamedCost(computing, below, rate)


def _assemble_group(
    config: LLMConfig, progress: Progress | None, interactive: bool, recruits: Recruits | None
) -> Assembly:
    """Start the ranks, which load the model, and wire an engine to them. This process holds no part of it."""
    if find_spec("msgspec") is None:
        raise InvalidConfig("several ranks need the package msgspec; pip install 'ridgeline[serve]'.")
    from ridgeline.ranks.apart import Apart  # here, because these need that package
    from ridgeline.ranks.leader import Group

    size, stages, kinds = config.ranks, config.pipeline_parallel_size, config.stage_kinds
    lead = kinds.index("cuda") if "cuda" in kinds else 0
    device = device_of_rank(config, lead)
    folder = resolve_model(config.model or EMBEDDED_MODEL, config.revision, config.download_dir)
    files = config.load_format != "dummy"
    found = described(folder, config)
    check_foreign(config, found, folder)
    if found.spec.pooling is not None:
        raise InvalidConfig(
            f"a model that embeds or classifies runs on one device; leave {' and '.join(config.divided_by)} out."
        )
    if found.spec.encoder is not None:
        raise InvalidConfig(
            f"a model with an encoder runs on one device yet; leave {' and '.join(config.divided_by)} out."
        )
    _check_towers(found.spec, config)
    model = with_cache(folder, found, kv_format(config.kv_cache_dtype), files=files)
    if config.all2all_backend == "peer" and device.type != "cuda":
        raise InvalidConfig("all2all_backend peer is for GPUs; use distributed.")
    longest = check_max_model_len(config.max_model_len, model.spec)
    if config.prefill_context_parallel_size > 1:
        check_divided(model.spec, device, config.prefill_context_parallel_size)
    part, stage = _parts(config, model.spec)
    draft = _draft(config, model.spec, folder, device, longest)
    if size * RANK_BYTES > (free := host_memory()):
        raise InvalidConfig(
            f"{' times '.join(config.divided_by)} is {size}: so many processes take {size * RANK_BYTES >> 20:,} MB "
            f"before they load anything, and {free >> 20:,} MB are free; lower it."
        )
    sent = _sent(config, folder, draft)
    if config.data_parallel_size > 1:
        group: Group = Apart(sent, size, config.distributed_timeout_seconds, progress, recruits=recruits)
    else:
        group = Group(sent, size, config.distributed_timeout_seconds, progress, stages=stages, recruits=recruits)
    try:
        read = folders_read(LLMConfig(**sent))
        if any(seen != fingerprint(*read) for seen in group.fingerprints):
            named = " or ".join(map(str, read))
            raise ModelLoadError(f"files of {named} were changed while ranks read them; start again.")
        divided = Divided(model, folder, device, lead, part, stage, None if draft is None else draft.spec)
        return _wired(config, group, divided, interactive)
    except BaseException:
        group.shutdown()
        raise


class Divided(NamedTuple):
    """A model that ranks divide.

    lead: the first rank on a GPU, if one is, whose device this is. part: a rank's of all stages together. stage: a
    rank's of the first stage. draft: what drafts for it, which each rank has all of.
    """

    model: ModelConfig
    folder: Path
    device: torch.device
    lead: int
    part: ModelSpec
    stage: ModelSpec
    draft: ModelSpec | None


def _wired(config: LLMConfig, group: Group, divided: Divided, interactive: bool) -> Assembly:
    """Wire an engine to ranks that have loaded."""
    from ridgeline.ranks.apart import Apart  # here, because these need the package msgspec
    from ridgeline.ranks.below import RanksBelow

    model, folder, device, lead, _, stage, draft = divided
    every = group.all_facts
    facts = every[lead]
    sizes = StepSizes.of(
        config,
        device_type=device.type,
        itemsize=DTYPE_BYTES[facts.dtype],
        max_tokens=facts.max_tokens,
        max_seqs=facts.max_seqs,
        longest=facts.max_model_len,
        ranks=config.prefill_context_parallel_size,
    )
    layout = CacheLayout(
        groups=with_draft(stage, draft).cache_groups,
        block_size=facts.block_size,
        dtype=facts.dtype,
        num_pages=facts.num_pages,
        ranks=sizes.ranks,
        scratch=sizes.scratch,
    )
    memory = MemoryReport(
        weights=facts.weights,
        activations=facts.activations,
        kv_cache=facts.kv_cache,
        layout=layout,
        max_model_len=facts.max_model_len,
        sizes=sizes,
    )
    exact = precision(facts.dtype)
    cost_model = _cost_of_stages(config, divided, [each.device_name for each in every], exact)
    if (waiting := max(every, key=lambda each: each.copying)).copying:  # of each part of a plan that stages run
        below = LayersBelow((), waiting.below_bytes, (0, 0), hides=device.type != "cpu")
        rate = waiting.below_bytes / waiting.copying / config.pipeline_parallel_size
        cost_model = _with_copies(cost_model, below, rate, facts.max_seqs)
    wiring = Wiring(
        memory,
        model.spec.vocab_size,
        facts.max_seqs,
        facts.cascade,
        cost_model,
        interactive,
        on_gpu=device.type == "cuda",
        host_tier=_host_tier(config, memory, _bus(facts.device_name, device)),
        model=model.spec,
    )
    if isinstance(group, Apart):
        each, ranks = [_engine(config, seat, wiring) for seat in group.seats], [[seat.rank] for seat in group.seats]
        engine: RunsRequests = Engines(each, group)
    else:
        each, ranks = [_engine(config, group, wiring)], [list(range(config.ranks))]
        engine = each[0]
    for own, sharing in zip(each, ranks, strict=True):
        if config.kv_disk is not None and (tier := own.scheduler.cache.tier) is not None:
            keep_on_disk(config, own, folder, device.type, RanksBelow(group, sharing, tier.layout))
    if any(each.captured for each in every):
        engine.rehearse()
        group.forget_expert_load()
    tell_events(config, each)
    if config.rebalancing is not None and (placement := placement_of(config, model.spec)):
        group.rebalance(config.rebalancing, placement)
    where = config.pipeline_devices or device.type
    logger.info("computing in %s on %d ranks (%s): %s", facts.dtype, config.ranks, where, facts.why)
    return Assembly(
        engine=engine,
        worker=group,
        ops=Ops(Platform(device_type=device.type)),
        model=model,
        folder=folder,
        device=device,
        dtype=facts.dtype,
        precision=exact,
        memory=memory,
    )


def _bus(name: str, device: torch.device) -> float:
    """Return the bytes a second that a device of this name gets from the host, where other processes have it."""
    hardware = hardware_named(name, device)
    if device.type != "cuda":
        return MEMORY_RATE
    return bus_rate(hardware)


def _check_towers(spec: ModelSpec, config: LLMConfig) -> None:
    """Raise InvalidConfig for a division that a model with a tower or a listener has not."""
    if spec.tower is None and spec.listener is None:
        return
    crosses = isinstance(spec.tower, TiledTowerSpec)
    for name in config.divided_by:
        if crosses and name != "tensor_parallel_size":
            raise InvalidConfig(
                f"layers of cross attention see this model's pictures, and {name} does not divide these yet; leave it "
                "out."
            )
        if spec.both_ways is not None and name == "prefill_context_parallel_size":
            raise InvalidConfig(
                "tokens of this model's pictures see each other both ways, and prefill_context_parallel_size divides "
                "no such tokens yet; leave it out."
            )


def _parts(config: LLMConfig, model: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """Return a rank's part of the model in all stages of a pipeline together, and in the first one. Raise
    InvalidConfig if ranks cannot divide the model so."""
    stages = config.pipeline_parallel_size
    counts = deal(model, stages, config.pipeline_layer_partition) if stages > 1 else (len(model.layers),)
    part = part_of(
        model,
        config.tensor_parallel_size,
        whole_experts=config.enable_expert_parallel,
        placement=placement_of(config, model),
        sources=config.data_parallel_size,
    )
    first = stage_of(part, 0, counts)
    if model.tower is not None and len(first.layers) < len(model.tower.deep):
        raise InvalidConfig(
            f"the tower's vectors are added behind {len(model.tower.deep)} layers, which must be the first stage's, "
            f"and this has {len(first.layers)}; lower pipeline_parallel_size, or give pipeline_layer_partition."
        )
    return part, first


def _draft(
    config: LLMConfig, model: ModelSpec, folder: Path, device: torch.device, longest: int
) -> DraftChoice | HeadChoice | None:
    """Return the draft model or draft head, or None if there is neither. Raise InvalidConfig or ModelLoadError for one
    that cannot."""
    if config.speculation is None:
        return None
    check_speculation(model, config.speculation)
    ops = Ops(Platform(device_type=device.type))
    return choose_draft(config, folder, model, ops, scheme(None), longest)  # ranks round its weights, not this process


def _sent(config: LLMConfig, folder: Path, draft: DraftChoice | HeadChoice | None) -> dict[str, Any]:
    """Return the settings as the ranks get them: all read the folders that were found once."""
    location = None if config.init_expert_location is None else str(config.init_expert_location)
    changed: dict[str, Any] = {"model": str(folder), "revision": None, "init_expert_location": location}
    changed["eplb_config"] = None  # the leader decides when experts move
    if config.speculation is not None and config.speculation.method in NAMED and draft is not None:
        changed["speculative_config"] = {**(config.speculative_config or {}), "model": str(draft.folder)}
    paths = {name: None if (path := getattr(config, name)) is None else str(path) for name in PATHS}
    return {**asdict(config), **changed, **paths, "kernels": dict(config.kernels)}


def _cost_of_stages(config: LLMConfig, divided: Divided, names: list[str], exact: Precision) -> CostModel | None:
    """Return the cost of a step, or None if a device is not known. names: the devices of all ranks."""
    stages, part = config.pipeline_parallel_size, divided.part
    if not config.unlike_stages:
        hardware = hardware_named(names[0], divided.device)
        if hardware is None:
            return None
        return Shared(Roofline(part, hardware, exact, expert_devices=config.data_parallel_size), stages)
    counts, rooflines = deal(part, stages, config.pipeline_layer_partition), []
    for stage, name in enumerate(names):
        if (hardware := hardware_named(name, device_of_rank(config, stage))) is None:
            return None
        rooflines.append(Roofline(stage_of(part, stage, counts), hardware, exact))
    return Slowest(rooflines)


class Slowest(NamedTuple):
    """The cost of steps of the stages of a pipeline, all of them at work."""

    stages: Sequence[CostModel]

    def step_limit(self, shape: StepShape) -> float:
        return max(stage.step_limit(shape) for stage in self.stages)


class Shared(NamedTuple):
    """The cost of steps that the stages of a pipeline share equally, all of them at work."""

    whole: CostModel
    stages: int

    def step_limit(self, shape: StepShape) -> float:
        return self.whole.step_limit(shape) / self.stages


class Wiring(NamedTuple):
    """The facts about a worker that its engine needs."""

    memory: MemoryReport
    vocab_size: int
    max_seqs: int
    cascade: bool
    cost_model: CostModel | None
    interactive: bool
    pools: bool = False
    on_gpu: bool = False
    encoder: ModelSpec | None = None
    output_rules: OutputRules = NO_RULES
    host_tier: HostTierSettings | None = None
    model: ModelSpec | None = None


def _host_tier(config: LLMConfig, memory: MemoryReport, bytes_per_second: float) -> HostTierSettings | None:
    """Return the settings of the tier in the host's memory, as each rank has it, or None."""
    if not config.host_bytes:
        return None
    layout = memory.layout
    return HostTierSettings(
        pages=HostLayout.within(layout, config.host_bytes // config.ranks).num_pages,
        bytes_per_second=bytes_per_second,
        staging_bytes=staging_bytes(layout.groups, layout.dtype, memory.sizes.max_tokens),
        preempted=config.preemption_mode,
    )


def _pictures(config: LLMConfig, wiring: Wiring) -> dict[str, Any]:
    """Return the facts that an engine needs of a tower, or of a listener where there is no tower."""
    if wiring.model is None:
        return {}
    tower, listener, sizes = wiring.model.tower, wiring.model.listener, wiring.memory.sizes
    together: dict[str, Any] = {"both_ways": wiring.model.both_ways}
    if wiring.model.both_ways is not None:
        together["most_together"] = _most_together(config, wiring, wiring.model)
    if tower is None and listener is None:
        return together if any(wiring.model.media_widths) else {}
    every = [each for each in (tower, listener) if each is not None]
    kept = {
        "kept_bytes": max(bytes_kept(each, sizes) for each in every),
        "vector_bytes": tuple(0 if each is None else vector_bytes(each, sizes) for each in (tower, listener)),
    }
    flops = 2 * (active_parameters(wiring.model) - sum(each.parameters for each in every))
    if tower is None:
        assert listener is not None
        return {
            **kept,
            "patch_cost": listener.position_flops / flops,
            "most_patches": listener.positions,
        }
    return {
        **kept,
        "patch_cost": tower.patch_flops / flops,
        "pixel_cost": PIXEL_FLOPS[_kind_of_senses(config, wiring)] / flops,
        "most_patches": patches_at_once(sizes, tower),
        "view_side": 0 if tower.grid is None or tower.grid.any_shape else tower.grid.side,
        **together,
        "picture_patches": tower.tiles * tower.side**2 if isinstance(tower, TiledTowerSpec) else 0,
        "crosses": wiring.model.most_crossed,
    }


def _kind_of_senses(config: LLMConfig, wiring: Wiring) -> str:
    """Return the kind of the device on which pictures are resized."""
    own = "cuda" if wiring.on_gpu else "cpu"
    return own if config.encoder_device in (None, "auto") else str(config.encoder_device).partition(":")[0]


def _most_together(config: LLMConfig, wiring: Wiring, model: ModelSpec) -> int:
    """Return the most tokens that a step has room for beside rows that decode. Beside a window the cache has room for
    WINDOW_CHUNK, and a prompt whose tokens all see each other fits the window. Raise InvalidConfig for trees of
    drafts."""
    if config.draft_depth is not None:
        raise InvalidConfig(
            "drafts that form trees are not for models whose pictures are seen both ways; draft chains."
        )
    most = wiring.memory.sizes.max_tokens - (wiring.max_seqs - 1) * (1 + config.num_drafts)
    mixers = (attention_of(layer.mixer) for layer in model.layers)
    windows = [each.window for each in mixers if each is not None and each.window is not None]
    if not windows:
        return most
    return min(most, *windows) if model.both_ways == "prompt" else min(most, WINDOW_CHUNK)


def _engine(config: LLMConfig, worker: Worker, wiring: Wiring) -> Engine:
    memory, cost_model, encodes = wiring.memory, wiring.cost_model, 0
    if wiring.encoder is not None:
        encodes = min(memory.max_model_len, memory.sizes.max_tokens, wiring.encoder.max_position_embeddings)
        encodes = memory.sizes.encoded or encodes
    engine_config = EngineConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=wiring.max_seqs,
        max_num_batched_tokens=memory.sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        policy=config.policy,
        state_cache_share=config.state_cache_share,
        state_checkpoint_interval=config.state_checkpoint_interval,
        itl_target=choose_itl_target(
            config.itl_target, cost_model, interactive=wiring.interactive and config.enable_chunked_prefill
        ),
        cascade=wiring.cascade,
        pools=wiring.pools,
        encodes=encodes,
        **_pictures(config, wiring),
        hears=wiring.encoder is not None and bool(memory.sizes.encoded),
        num_drafts=config.num_drafts,
        draft_depth=config.draft_depth,
        drafted_ahead=config.drafted_ahead,
        even_drafts=wiring.on_gpu,
        lookup=(0, 0) if config.speculation is None else config.speculation.looked_up,
        cuts_chunks=config.pipeline_parallel_size > 1,
        host_tier=wiring.host_tier,
        sessions=SessionBounds(ttl=config.session_ttl, share=config.session_share) if config.session_ttl else None,
        max_loras=config.max_loras if config.enable_lora else 0,
        adapted_encoders=config.enable_tower_connector_lora,
        debug_checks=config.debug_checks,
    )
    return Engine(
        engine_config,
        memory.layout,
        worker,
        vocab_size=wiring.vocab_size,
        cost_model=cost_model,
        output_rules=wiring.output_rules,
    )
