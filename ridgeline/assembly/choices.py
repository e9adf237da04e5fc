"""The decisions that are made before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ridgeline.assembly.draft import DraftChoice, HeadChoice, choose_draft
from ridgeline.assembly.foreign import check_foreign
from ridgeline.assembly.forms import kept_forms
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.plan.sharding import with_cached_experts
from ridgeline.core.plan.stages import of_stage
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.speculation import LAYER_SKIP, Speculation
from ridgeline.core.settings.steps import check_limits
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec, WeightMap, lender_of, with_draft
from ridgeline.core.specs.state import DTYPE_BYTES, ChunkedKVSpec
from ridgeline.core.timeline import Timeline
from ridgeline.defaults import (
    check_chunks,
    check_deterministic,
    check_divided,
    check_max_model_len,
    choose_block_size,
    choose_device,
    choose_dtype,
    choose_kernels,
    choose_limits,
    shared_device,
)
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.kernels.base.launch import num_multiprocessors
from ridgeline.kernels.base.op import Platform, on_gpu
from ridgeline.kernels.base.weight_format import HeldMatrix
from ridgeline.kernels.ops import Ops
from ridgeline.models.config import ModelConfig
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.held import held_alike, held_precision
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.streamed import ExpertsBelow, WeightsBelow, cheaper, experts_below, layers_below
from ridgeline.quantization.scheme import Scheme, scheme
from ridgeline.weights.adapters.places import ENCODERS
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import check_files, described, resolve_model, stored_forms, with_cache
from ridgeline.weights.quantized.config import method_name
from ridgeline.weights.quantized.plan import Forms
from ridgeline.worker.early import Early
from ridgeline.worker.machine import hardware_of
from ridgeline.worker.memory import (
    Budget,
    MemoryReport,
    check_fits,
    check_weights_fit,
    host_memory,
    parts_of,
    plan_memory,
    weight_bytes,
)
from ridgeline.worker.precompile import KernelSet

STEADY = 1024  # cached tokens of each row of the step for which weights below are chosen


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The decisions that are made before anything is loaded.

    part: what this rank computes of the model; all of it if there is one rank.
    why: the reason for the dtype.
    forms: the matrices that keep the form of the files, of this rank's stage.
    draft: the model or head that drafts, if one does.
    longest: the context that memory has room for, if that is known before the weights are loaded.
    captured: decode steps run as CUDA graphs.
    below: the weights that wait in the host's memory, if some do.
    senses: the device of a tower or a listener, if the user names one.
    timeline: the stages of the start.
    early: the work that was begun before.
    """

    config: LLMConfig
    device: torch.device
    folder: Path
    model: ModelConfig
    part: ModelSpec
    mesh: Mesh
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
    draft: DraftChoice | HeadChoice | None = None
    below: WeightsBelow | None = None
    senses: torch.device | None = None
    timeline: Timeline = field(default_factory=Timeline)
    early: Early | None = None

    def memory(self, *, weights: int, loaded: bool, longest: int) -> MemoryReport:
        """Size the KV cache for weights of so many bytes."""
        draft, config = None if self.draft is None else self.draft.spec, self.config
        sizes = StepSizes.of(
            config,
            device_type=self.device.type,
            itemsize=DTYPE_BYTES[self.dtype],
            max_tokens=self.max_tokens,
            max_seqs=self.max_seqs,
            longest=longest,
            ranks=self.mesh.cp.size,
            encoded=window_of(self.model.spec) or self.model.spec.crosses,
        )
        cache = CacheLayout(
            groups=with_draft(self.part, draft).cache_groups,
            block_size=sizes.ranks * choose_block_size(config, self.device),
            dtype=self.dtype,
            num_pages=2,
            ranks=sizes.ranks,
            scratch=sizes.scratch,
        )
        here = config.stage_kinds.count("cpu") or self.mesh.size
        sharing = here if self.device.type == "cpu" else 1
        budget = Budget(device=self.device, config=config, weights=weights, loaded=loaded, ranks=sharing)
        reads = 1 if self.draft is None else self.draft.reads
        return plan_memory(cache, sizes, parts_of(self.part, config, draft, reads, self.senses_apart), budget)

    @property
    def senses_apart(self) -> bool:
        """True if a tower or a listener has a device of its own."""
        return self.senses not in (None, self.device)

    @property
    def expert_slots(self) -> int:
        """The number of experts of a layer whose matrices the device holds; 0: of all."""
        own = self.config.moe_expert_cache_size
        return self.below.slots if isinstance(self.below, ExpertsBelow) else own

    @property
    def captures_later(self) -> bool:
        """True if some graphs are captured once the engine is ready. Ranks capture the same ones at the same time, and
        what drafts has a state that captures would change. Of others'
        modules it is only known by capturing them whether they can be."""
        plain = self.mesh.size == 1 and self.config.speculation is None and self.model.foreign is None
        return plain and not self.config.capture_at_start

    @property
    def precision(self) -> Precision:
        return precision_of(self.model.spec, self.dtype, self.scheme, self.forms, self.device)

    @property
    def kernels(self) -> KernelSet:
        """The kernels that the engine will need."""
        draft = self.draft
        return KernelSet(
            spec=self.part,
            arch=self.ops.platform.arch,
            multiprocessors=num_multiprocessors(self.device),
            dtype=self.dtype,
            max_model_len=self.wanted_len,
            max_seqs=self.max_seqs,
            max_tokens=self.max_tokens,
            block_size=choose_block_size(self.config, self.device),
            cascade=self.cascade,
            overrides=tuple(sorted(self.overrides.items())),
            quantization=self.scheme.name,
            forms=tuple(sorted(self.forms.items())),
            speculation=self.config.speculation,
            draft=None if draft is None else draft.network,
            draft_quantization=None if draft is None else draft.scheme.name,
            draft_forms=() if draft is None else tuple(sorted(draft.forms.items())),
            foreign=self.model.foreign,
        )


def precision_of(
    model: ModelSpec, dtype: str, weights: Scheme, forms: Mapping[str, HeldMatrix], device: torch.device
) -> Precision:
    """Return the precision of a model. forms: of the matrices that keep the form of the files."""
    plain, own, rate = precision(dtype), weights.product_bytes, weights.product_rate
    if own is None or (device.type == "cpu" and rate == "fp8"):  # of which a CPU keeps plain numbers
        return held_precision(plain, model, forms)
    return held_alike(plain, model, own, rate)


def choose(config: LLMConfig, device: torch.device, mesh: Mesh | None = None) -> Choices:
    """Settle everything that needs no weights. Raise InvalidConfig or ModelLoadError for what could never run."""
    mesh = mesh or Mesh()
    platform, folder = (
        Platform.of(device),
        resolve_model(config.model or EMBEDDED_MODEL, config.revision, config.download_dir),
    )
    weights = _scheme(config.quantization, folder)
    weights.check(platform)
    files = config.load_format != "dummy"
    found = described(folder, config)
    check_foreign(config, found, folder)
    model = with_cache(folder, found, kv_format(config.kv_cache_dtype), files=files)
    _check_crossing(config, model.spec)
    senses = _device_of_senses(config, device, model.spec)
    part, own = mesh.part_of(model.spec), mesh.stage_of(model.spec)
    if mesh.cp.size > 1:
        check_divided(model.spec, device, mesh.cp.size)
    # What ranks hold that divide the experts alone, or all of what ranks of tensor parallelism divide
    weighed, ranks = (own, mesh.tp.size) if mesh.exchange is None else (part, 1)
    if config.moe_expert_cache_size:
        _check_offload(config, model, platform)
        weighed = with_cached_experts(own, config.moe_expert_cache_size) if on_gpu(platform) else own
    if senses not in (None, device):
        weighed = replace(weighed, tower=None, listener=None)
    shared = shared_device(config, device)
    dtype, why = choose_dtype(config.dtype, model.dtype, shared)
    wanted_len = check_max_model_len(config.max_model_len, model.spec)
    check_chunks(model.spec, choose_block_size(config, device), wanted_len)
    overrides = choose_kernels(config, device)
    ops = Ops(platform, overrides)
    if config.moe_expert_cache_size and (method_name(folder) is not None or is_gguf(folder)):
        raise InvalidConfig(
            "moe_expert_cache_size copies plain weights, and this checkpoint is quantized; leave it out."
        )
    if method_name(folder) is None and not is_gguf(folder) and config.weights_below is None:
        check_weights_fit(weighed, device, dtype=dtype, positions=1, ranks=ranks)
    if files:
        check_files(folder, model)
    forms = of_stage(kept_forms(stored_forms(folder, model, files=files), config, folder, ops), own)
    if senses is not None:
        _check_senses(model.spec, senses, device, DTYPE_BYTES[dtype])
        held = any(name.startswith(ENCODERS) for name in forms) or weights.name != "plain"
        if held and senses.type != device.type:
            raise InvalidConfig(
                f"encoder_device is {senses} beside {device}, and weights are quantized, for which both must be of one "
                "kind; leave encoder_device out."
            )
    check_deterministic(config, model.spec, device, coded=bool(forms) or weights.name != "plain")
    below, saved = None, 0
    max_seqs, max_tokens = choose_limits(config, shared, model.spec.pooling, wanted_len)
    max_tokens = with_room_for_window(max_tokens, model.spec, config)
    if config.weights_below is not None:
        exact = precision_of(model.spec, dtype, weights, forms, device)
        below = _below(config, model, part, platform, exact, max_seqs)
        if on_gpu(platform):
            saved = below.saved
    check_weights_fit(weighed, device, dtype=dtype, positions=1, forms=forms.values(), ranks=ranks, saved=saved)
    draft = None
    if config.speculation is not None:
        check_speculation(model.spec, config.speculation)
        draft = choose_draft(config, folder, model.spec, ops, weights, wanted_len)
    if draft is not None:
        check_fits(draft.what, draft.weight_bytes(DTYPE_BYTES[dtype]), device, dtype=dtype)
    if config.num_drafts:
        check_limits(max_seqs, max_tokens, config.num_drafts)
    cascade = on_gpu(platform) and not config.deterministic if config.cascade is None else config.cascade
    # Ranks run the same plans, and whose tokens are divided, the same graphs
    cascade = cascade and not config.unlike_stages and mesh.cp.size == 1 and mesh.exchange is None
    choices = Choices(
        config=config,
        device=device,
        folder=folder,
        model=model,
        part=replace(part, vocab_size=model.spec.vocab_size),
        mesh=mesh,
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
        captured=on_gpu(platform)
        and not config.enforce_eager
        and not (model.spec.pooling or below),  # graphs cannot wait for copies of the step before
        below=below,
        draft=draft,
        senses=senses,
    )
    item = weights.weight_bytes or DTYPE_BYTES[dtype]
    least = weight_bytes(weighed, dtype_bytes=item, positions=1, forms=forms.values()) // ranks - saved
    if draft is not None:
        least += draft.weight_bytes(item)
    longest = _longest(choices, least, wanted_len)
    check_weights_fit(weighed, device, dtype=dtype, positions=longest, forms=forms.values(), ranks=ranks, saved=saved)
    return replace(choices, longest=longest)


def _longest(choices: Choices, weights: int, planned: int) -> int:
    """Return the context that memory has room for beside the weights, if steps are planned for a context of `planned`
    tokens. Steps of shorter contexts take less (rows of latent attention), so these are tried if there is no room."""
    try:
        return choices.memory(weights=weights, loaded=False, longest=planned).max_model_len
    except InvalidConfig:
        if choices.config.max_model_len is None and planned > choices.max_tokens:
            with suppress(InvalidConfig):
                return _longest(choices, weights, planned // 2)
        raise


def _device_of_senses(config: LLMConfig, device: torch.device, model: ModelSpec) -> torch.device | None:
    """Return the device of the tower or listener, if the user names one. Raise InvalidConfig for a model without, or a
    device that is not here."""
    if config.encoder_device is None:
        return None
    if model.tower is None and model.listener is None:
        raise InvalidConfig(
            "encoder_device is for models in whose prompts vectors of pictures or sounds stand; leave it out."
        )
    if config.enable_tower_connector_lora:
        raise InvalidConfig("enable_tower_connector_lora does not go with encoder_device yet; leave one of them out.")
    found = choose_device(config.encoder_device, "encoder_device")
    return device if str(found) == "cuda" and device.type == "cuda" else found  # without a number: the model's GPU


def _check_senses(model: ModelSpec, senses: torch.device, device: torch.device, itemsize: int) -> None:
    """Raise InvalidConfig if the device of a tower or a listener does not hold it."""
    if senses != device:
        numbers = sum(each.parameters for each in (model.tower, model.listener) if each is not None)
        check_fits("what sees or hears", numbers * itemsize, senses, dtype=f"{itemsize} bytes a number")


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


def check_speculation(model: ModelSpec, speculation: Speculation) -> None:
    """Raise InvalidConfig if no drafts can be verified of what the model writes, or if it cannot make them itself as it
    should."""
    if model.pooling is not None:
        raise InvalidConfig("speculative_config is for models that write, and this one pools; leave it out.")
    if model.encoder is not None:
        raise InvalidConfig("speculative_config is not for models with an encoder yet; leave it out.")
    if speculation.tree is not None and any(group.spec.exact for group in model.cache_groups):
        raise InvalidConfig(
            "trees of drafts are not for recurrent layers, which go on from one state; take a chain of drafts: "
            "num_speculative_tokens alone in speculative_config."
        )
    if speculation.tree is not None and any(isinstance(group.spec, ChunkedKVSpec) for group in model.cache_groups):
        raise InvalidConfig(
            "trees of drafts are not for attention inside chunks yet; take a chain of drafts: num_speculative_tokens "
            "alone in speculative_config."
        )
    if speculation.method == LAYER_SKIP:
        skipped = speculation.skipped(len(model.layers))
        borrowed = {lender_of(each.mixer) for layer, each in enumerate(model.layers) if layer not in skipped}
        if lost := [layer for layer in skipped if layer in borrowed]:
            whose = "its default" if speculation.skip_layers is None else "skip_layers of speculative_config"
            raise InvalidConfig(
                f"layer_skip would leave out layer {lost[0]} by {whose}, and others need its keys or its choice; name "
                "other layers in skip_layers."
            )
        if any(group.spec.exact for group in model.cache_groups):
            raise InvalidConfig(
                "layer_skip would let this model's recurrent layers forget what they have read; take another method of "
                "speculative_config."
            )


def _check_crossing(config: LLMConfig, model: ModelSpec) -> None:
    """Raise InvalidConfig for settings that do not go with layers of cross attention to pictures."""
    for name, asked in (
        ("kv_offloading_size", config.host_bytes > 0),
        ("cpu_offload_gb and offload_group_size", config.weights_below is not None),
        ("enable_lora", config.enable_lora),
        ("speculative_config", config.speculation is not None),
    ):
        if model.crosses and asked:
            raise InvalidConfig(f"{name} does not go with cross attention to pictures yet; leave it out.")


def _below(
    config: LLMConfig, model: ModelConfig, part: ModelSpec, platform: Platform, exact: Precision, rows: int
) -> WeightsBelow:
    """Return the weights that wait in the host's memory: whole layers, or experts if steps of so many rows take less
    time with them. Raise InvalidConfig if none can. part: of the model, that a rank has. exact: its precision."""
    spec, wanted = model.spec, config.weights_below
    assert wanted is not None
    if spec.pooling is not None or spec.encoder is not None:
        raise InvalidConfig("cpu_offload_gb and offload_group_size are for models that write; leave them out.")
    modules = named_so(model.weights, wanted.names, part) if wanted.names else None
    layers = layers_below(part, wanted, exact, modules)._replace(hides=on_gpu(platform))
    if layers.num_bytes * config.ranks > (free := host_memory()):
        raise InvalidConfig(
            f"{layers.num_bytes * config.ranks / (1 << 30):.1f} GiB of weights are to wait in the host's memory, of "
            f"which {free / (1 << 30):.1f} GiB are free; lower cpu_offload_gb, or offload_num_in_group."
        )
    plain = config.ranks == 1 and exact.product_rate == exact.other_rate and not exact.held
    chosen = wanted.group[0] or wanted.names
    if chosen or not plain or _experts_that_cannot_wait(model) is not None:
        return layers
    device = torch.device(platform.device_type)
    hardware = hardware_of(device)
    steps = StepShape([1] * rows, [STEADY] * rows, rows)
    computing = 0.0 if hardware is None else Roofline(spec, hardware, exact).step_limit(steps)
    return cheaper(layers, experts_below(part, wanted.gib, exact), rows, bus_rate(hardware), computing)


def named_so(weights: WeightMap, parts: Collection[str], spec: ModelSpec) -> set[str]:
    """Return the decoder's modules of a model, or of a stage of it, whose weights have a name in the files with one of
    these parts: whole words between dots."""
    found = {
        parameter.rpartition(".")[0]: parameter
        for parameter, sources in weights.items()
        if any(f".{part}." in f".{source.name}." for source in sources for part in parts)
    }
    return set(of_stage(found, spec))


def _experts_that_cannot_wait(model: ModelConfig) -> str | None:
    """Return the reason why the model's experts cannot wait in the host's memory one by one, or None."""
    mixtures = [layer.feed_forward for layer in model.spec.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    if not mixtures:
        return "is for mixtures of experts, and the model is none"
    if any(mixture.own_norms is not None for mixture in mixtures):
        return "does not go with experts that have norms of their own"
    if any(mixture.late for mixture in mixtures):
        return "does not go with experts whose sums come late"
    return None


def _check_offload(config: LLMConfig, model: ModelConfig, platform: Platform) -> None:
    """Raise InvalidConfig if the model's experts cannot wait in the host's memory."""
    if (reason := _experts_that_cannot_wait(model)) is not None:
        raise InvalidConfig(f"moe_expert_cache_size {reason}; leave it out.")
    if on_gpu(platform) and not config.enforce_eager:
        raise InvalidConfig("moe_expert_cache_size looks at routes on the host, which no graph can; set enforce_eager.")


def window_of(spec: ModelSpec) -> int:
    """Return the encoder's inputs of every window of sound; 0 if the model reads none."""
    return 0 if spec.encoder is None or spec.encoder.stem is None else spec.encoder.stem.positions


def with_room_for_window(max_tokens: int, spec: ModelSpec, config: LLMConfig) -> int:
    """Return the tokens of a step, with room for a window of sound. Raise InvalidConfig if the user wants fewer."""
    window = window_of(spec)
    if config.max_num_batched_tokens is not None and max_tokens < window:
        raise InvalidConfig(
            f"max_num_batched_tokens is {max_tokens}, and a window of sound takes {window} in one step; raise it."
        )
    return max(max_tokens, window)
