"""Nemotron-H and Nemotron 3: each layer has one part, Mamba-2, attention, squared ReLUs, or experts with such."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import ABSENT, AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, WeightMap
from ridgeline.models.config import MAX_COUNTS, Config, wrong
from ridgeline.models.experts import ExpertNames, layer_experts, routing, with_experts
from ridgeline.models.mamba import backbone
from ridgeline.models.names import mamba2, named
from ridgeline.models.selective import Mamba2Names, mamba2_of, need_silu

DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
NAMES = Mamba2Names(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_width="ssm_state_size",
    length="conv_kernel",
    conv_bias="use_conv_bias",
)
EXPERTS = ExpertNames(
    router="mixer.gate",
    expert="mixer.experts.{}",
    gate_up=("up_proj",),
    shared="mixer.shared_experts",
    correction="mixer.gate.e_score_correction_bias",
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
Part = Mamba2Spec | AttentionSpec | MLPSpec | ExpertsSpec

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}  # by transformers 5


class NemotronH:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        need_silu(values, "mamba_hidden_act")
        if (activation := values.raw("mlp_hidden_act")) != "relu2":
            raise wrong("mlp_hidden_act", activation, "relu2")
        norm, kinds = NormSpec(eps=values.number("layer_norm_epsilon")), _kinds(values)
        made = {kind: _layer(_part(kind, values, norm), norm) for kind in dict.fromkeys(kinds)}
        found = ModelSpec(
            architecture="NemotronHForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=values.integer("hidden_size"),
            layers=tuple(made[kind] for kind in kinds),
            final_norm=norm,
            max_position_embeddings=values.integer("max_position_embeddings"),
            unused=("mtp.",),
        )
        mixtures = {
            index: layer.feed_forward
            for index, layer in enumerate(found.layers)
            if isinstance(layer.feed_forward, ExpertsSpec)
        }
        return with_experts(found, mixtures)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = backbone(spec)
        for index, layer in enumerate(spec.layers):
            theirs = f"backbone.layers.{index}"
            mixer, feed_forward = f"layers.{index}.mixer", f"layers.{index}.feed_forward"
            match layer.mixer, layer.feed_forward:
                case Mamba2Spec() as selective, _:
                    found |= mamba2(mixer, f"{theirs}.mixer", selective)
                    found |= named(mixer, f"{theirs}.mixer", {"mamba_in": "in_proj"}, bias=selective.bias)
                case AttentionSpec(), _:
                    found |= named(mixer, f"{theirs}.mixer", {"qkv": "q_proj k_proj v_proj", "out": "o_proj"})
                case _, MLPSpec() as mlp:
                    modules = {"up": "up_proj", "down": "down_proj"}
                    found |= named(feed_forward, f"{theirs}.mixer", modules, bias=mlp.bias)
                case _, ExpertsSpec() as experts:
                    found |= layer_experts(feed_forward, theirs, experts, EXPERTS)
        return found


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer, which configs say in a list, or in a word with a letter for each layer."""
    name = "layers_block_type" if "layers_block_type" in config else "hybrid_override_pattern"
    given = config.raw(name)
    if given is None:
        raise ModelLoadError("config.json has no layers_block_type; the model cannot be built without it.")
    if name == "hybrid_override_pattern" and isinstance(given, str):
        found = [PATTERN.get(letter) for letter in given]
    elif isinstance(given, list) and all(isinstance(kind, str) for kind in given):
        found = [RENAMED.get(kind, kind) for kind in given]
    else:
        found = [None]
    most = MAX_COUNTS["num_hidden_layers"]
    kinds = [kind for kind in found if kind in PATTERN.values()]
    if not kinds or len(kinds) < len(found) or len(kinds) > most:
        raise wrong(name, given, f"1 to {most} layers, each of {' or '.join(PATTERN.values())}")
    return [kind for kind in kinds if kind is not None]


def _part(kind: str, config: Config, norm: NormSpec) -> Part:
    match kind:
        case "mamba":
            return _mamba(config, norm)
        case "attention":
            return _attention(config)
        case "moe":
            return _experts(config)
    return _plain(config, "intermediate_size", config.boolean("mlp_bias"))


def _layer(part: Part, norm: NormSpec) -> LayerSpec:
    if isinstance(part, MLPSpec | ExpertsSpec):
        return LayerSpec(mixer=ABSENT, feed_forward=part, norm=norm)
    return LayerSpec(mixer=part, feed_forward=ABSENT, norm=norm)


def _mamba(config: Config, norm: NormSpec) -> Mamba2Spec:
    """Return the mixer, whose steps have a least length, as in transformers."""
    least = config.number("time_step_min")
    return mamba2_of(config, norm, names=NAMES, bias=config.boolean("use_bias"), limits=(least, inf))


def _attention(config: Config) -> AttentionSpec:
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} of num_attention_heads")
    head_dim = config.integer("head_dim")
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def _plain(config: Config, size: str, bias: bool = False) -> MLPSpec:
    return MLPSpec(intermediate_size=config.integer(size), activation="relu2", gated=False, bias=bias)


def _experts(config: Config) -> ExpertsSpec:
    config.refuse("mlp_bias", "mixtures of experts have no biases")
    return ExpertsSpec(
        routing=routing(
            config,
            score="sigmoid",
            renormalize=config.boolean("norm_topk_prob"),
            correction=True,
            group_score="top2",
        ),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation="relu2",
        shared=_plain(config, "moe_shared_expert_intermediate_size"),
        latent=config.integer("moe_latent_size") if "moe_latent_size" in config else None,
    )
