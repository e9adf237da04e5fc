"""The shared parts of families whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import Names, decoder_weights

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

MAX_MATRICES = 2**18  # experts of all layers: ten times as many as any model has
MAX_STACK = 2**48  # numbers of one layer's experts: far above any real layer, and their bytes do not overflow


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names that a family's checkpoints give to a layer's experts, below "model.layers.N".

    expert: an expert's name, in which {} stands for its number. Without {}, every tensor holds all experts.
    gate_up: gate and up, in two tensors or in one.
    correction: the bias that is added for the choice alone. correction_row: it is stored as a matrix of one row.
    latent: the projections before and behind the experts.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_row: bool = False
    latent: tuple[str, str] = ("mlp.latent_in", "mlp.latent_out")


def routing(
    config: Config,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = False,
    correction: bool = False,
    group_score: Literal["max", "top2"] | None = None,
) -> RoutingSpec:
    """Return the routing of tokens, with the counts that the config has. Raise ModelLoadError if they contradict.

    group_score: None for families without groups and without a scaling factor: their configs may have such entries,
        and transformers does not look at them. "expert_weights_scale" is GGUF's, which any family may have.
    """
    name = next((name for name in COUNTS if name in config), COUNTS[0])
    experts, top_k = config.integer(name), config.integer("num_experts_per_tok")
    grouped = group_score is not None
    groups, top_groups = (config.integer(key) if grouped and key in config else 1 for key in ("n_group", "topk_group"))
    if top_k > experts:
        raise config.wrong("num_experts_per_tok", top_k, f"at most the {experts} of {name}")
    least = 2 if group_score == "top2" and groups > 1 else 1
    if experts % groups or experts // groups < least:
        want = f"a divisor of the {experts} of {name}, with {least} or more experts in a group"
        raise config.wrong("n_group", groups, want)
    if top_groups > groups:
        raise config.wrong("topk_group", top_groups, f"at most the {groups} of {config.spelled('n_group')}")
    if top_k > (usable := experts // groups * top_groups):
        want = f"at most {usable}, the experts of the {top_groups} of topk_group"
        raise config.wrong("num_experts_per_tok", top_k, want)
    return RoutingSpec(
        experts=experts,
        top_k=top_k,
        score=score,
        renormalize=renormalize,
        scale=config.number("routed_scaling_factor" if grouped else "expert_weights_scale", 1.0),
        groups=groups,
        top_groups=top_groups,
        group_score=group_score or "max",
        correction=correction,
    )


def corrected_routing(config: Config) -> RoutingSpec:
    """Return the routing of DeepSeek-V3 and its kin: sigmoids, a correction for the choice alone, and groups by their
    best two."""
    renormalize = config.boolean("norm_topk_prob")
    return routing(config, score="sigmoid", renormalize=renormalize, correction=True, group_score="top2")


def mixture(config: Config, how: RoutingSpec) -> ExpertsSpec:
    """Return a layer's experts, with the shared ones as one."""
    return ExpertsSpec(
        routing=how,
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        shared=shared_experts(config),
    )


def sparse_layers(config: Config) -> list[int]:
    """Return the layers that have experts, as Qwen's configs say it: every `decoder_sparse_step`-th one, but none of
    `mlp_only_layers`."""
    count, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step")
    dense = config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise wrong("mlp_only_layers", dense, "a list of the numbers of layers")
    return [layer for layer in range(count) if layer not in dense and (layer + 1) % step == 0]


def later_layers(config: Config) -> list[int]:
    """Return the layers that have experts, as DeepSeek's configs say it: from `first_k_dense_replace` on, those whose
    number `moe_layer_freq` divides."""
    count, step = config.integer("num_hidden_layers"), config.integer("moe_layer_freq")
    return [layer for layer in range(config.integer("first_k_dense_replace", at_least=0), count) if layer % step == 0]


def typed_layers(config: Config) -> list[int] | None:
    """Return the layers that have experts, as `mlp_layer_types` says it; None if there is no such entry."""
    count, types = config.integer("num_hidden_layers"), config.raw("mlp_layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count or any(kind not in ("dense", "sparse") for kind in types):
        raise wrong("mlp_layer_types", types, f"{count} entries, each dense or sparse")
    return [layer for layer, kind in enumerate(types) if kind == "sparse"]


def shared_experts(config: Config) -> MLPSpec | None:
    """Return the MLP that `n_shared_experts` experts of the usual size are together, or None if there are none."""
    count = config.integer("n_shared_experts", at_least=0) if "n_shared_experts" in config else 0
    size = count * config.integer("moe_intermediate_size")
    return MLPSpec(intermediate_size=size, activation=config.activation("hidden_act")) if count else None


def with_experts(dense: ModelSpec, experts: Mapping[int, ExpertsSpec]) -> ModelSpec:
    """Return the model with mixtures of experts in some of its layers. Raise ModelLoadError if they are too many or
    too large for any machine."""
    if (total := sum(spec.routing.experts for spec in experts.values())) > MAX_MATRICES:
        raise ModelLoadError(
            f"config.json asks for {total} experts in all layers; at most {MAX_MATRICES} can be built."
        )
    for spec in experts.values():
        if spec.routing.experts * spec.intermediate_size * dense.hidden_size > MAX_STACK:
            raise ModelLoadError(
                f"config.json asks for {spec.routing.experts} experts of {spec.intermediate_size} x "
                f"{dense.hidden_size} in a layer, which no memory holds; correct the sizes."
            )
    layers = (
        replace(layer, feed_forward=experts[index]) if index in experts else layer
        for index, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=tuple(layers))


def drafting_layers(config: Config, count: str) -> tuple[str, ...]:
    """Return the names under which a checkpoint stores `count` layers after the last, which draft further tokens
    (multi-token prediction). No architecture runs them yet."""
    first = config.integer("num_hidden_layers")
    more = config.integer(count, at_least=0) if count in config else 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + more))


def expert_weights(spec: ModelSpec, names: ExpertNames = ExpertNames(), others: Names = Names()) -> WeightMap:
    """Return the weight map of a model that is Llama but for its experts. others: the names of what is no expert's."""
    found = decoder_weights(spec, others)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            found |= layer_experts(f"layers.{index}.feed_forward", f"model.layers.{index}", layer.feed_forward, names)
    return found


def layer_experts(ours: str, theirs: str, spec: ExpertsSpec, names: ExpertNames) -> WeightMap:
    """Return the weight map of one layer's experts."""
    each = [names.expert.format(expert) for expert in range(spec.routing.experts - spec.idle)]

    def stored(part: str, kind: str = "weight") -> Source:
        return Source(name=f"{theirs}.{part}.{kind}")

    def of_all(parts: Sequence[str], kind: str) -> tuple[Source, ...]:
        if "{}" not in names.expert:
            return tuple(replace(stored(f"{names.expert}.{part}", kind), stacked=True) for part in parts)
        return tuple(stored(f"{expert}.{part}", kind) for expert in each for part in parts)

    found: WeightMap = {f"{ours}.router": (stored(names.router),)}
    if spec.routing.bias:
        found[f"{ours}.router_bias"] = (stored(names.router, "bias"),)
    if spec.routing.correction:
        found[f"{ours}.correction"] = (Source(name=f"{theirs}.{names.correction}", row=names.correction_row),)
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        found[f"{ours}.gate_up.{kind}"] = of_all(names.gate_up, kind)
        found[f"{ours}.down.{kind}"] = of_all([names.down], kind)
    if spec.shared is not None:
        first = "gate_up" if spec.shared.gated else "up"
        found[f"{ours}.shared.{first}.weight"] = tuple(stored(f"{names.shared}.{part}") for part in names.gate_up)
        found[f"{ours}.shared.down.weight"] = (stored(f"{names.shared}.{names.down}"),)
    if spec.shared_gate:
        found[f"{ours}.shared_gate.weight"] = (stored(names.shared_gate),)
    if spec.latent is not None:
        for name, part in zip(("latent_in", "latent_out"), names.latent, strict=True):
            found[f"{ours}.{name}.weight"] = (stored(part),)
    return found
