"""The shared parts of families whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.core.expert_spec import ExpertsSpec
from ridgeline.core.model_spec import ModelSpec, Source, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.llama import Llama

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names that a family's checkpoints give to a layer's experts, below "model.layers.N".

    expert: an expert's name, in which {} stands for its number.
    gate, up, down: its three maps.
    correction: the bias that is added for the choice alone.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    correction: str = "mlp.gate.e_score_correction_bias"


def num_experts(config: Config) -> int:
    """Return how many experts a layer has. Files call it by several names."""
    return config.integer(next((name for name in COUNTS if name in config), COUNTS[0]))


def with_experts(dense: ModelSpec, experts: Mapping[int, ExpertsSpec]) -> ModelSpec:
    """Return the model with mixtures of experts in some of its layers."""
    layers = (
        replace(layer, feed_forward=experts[index]) if index in experts else layer
        for index, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=tuple(layers))


def expert_weights(spec: ModelSpec, names: ExpertNames = ExpertNames()) -> WeightMap:
    """Return the weight map of a model that is Llama but for its experts."""
    found = Llama.weights(spec)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            found |= layer_experts(f"layers.{index}.feed_forward", f"model.layers.{index}", layer.feed_forward, names)
    return found


def layer_experts(ours: str, theirs: str, spec: ExpertsSpec, names: ExpertNames) -> WeightMap:
    """Return the weight map of one layer's experts, each stored as three matrices of its own."""
    each = range(spec.routing.experts)

    def stored(part: str, kind: str = "weight") -> Source:
        return Source(name=f"{theirs}.{part}.{kind}")

    found: WeightMap = {f"{ours}.router": (stored(names.router),)}
    if spec.routing.bias:
        found[f"{ours}.router_bias"] = (stored(names.router, "bias"),)
    if spec.routing.correction:
        found[f"{ours}.correction"] = (Source(name=f"{theirs}.{names.correction}"),)
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        found[f"{ours}.gate_up.{kind}"] = tuple(
            stored(f"{names.expert.format(expert)}.{part}", kind) for expert in each for part in (names.gate, names.up)
        )
        found[f"{ours}.down.{kind}"] = tuple(stored(f"{names.expert.format(e)}.{names.down}", kind) for e in each)
    if spec.shared is not None:
        found[f"{ours}.shared.gate_up.weight"] = (
            stored(f"{names.shared}.{names.gate}"),
            stored(f"{names.shared}.{names.up}"),
        )
        found[f"{ours}.shared.down.weight"] = (stored(f"{names.shared}.{names.down}"),)
    if spec.shared_gate:
        found[f"{ours}.shared_gate.weight"] = (stored(names.shared_gate),)
    return found
