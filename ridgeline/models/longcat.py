"""LongCat-Flash: two layers of latent attention a block, beside which experts run, some of which compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import ExpertNames, layer_experts, routing, with_experts
from ridgeline.models.latent import DEFAULTS as LATENT_DEFAULTS
from ridgeline.models.latent import latent_like, mixer_weights
from ridgeline.models.names import named, outer

DEFAULTS = {
    **LATENT_DEFAULTS,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
    "n_routed_experts": 512,
    "num_experts_per_tok": 12,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 6.0,
    "zero_expert_num": 256,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
SPELLINGS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}
NAMES = ExpertNames(
    router="mlp.router.classifier",
    correction="mlp.router.e_score_correction_bias",
    shared="mlps.0",
    expert="mlp.experts.{}",
)


class LongCat:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS, SPELLINGS)
        values.refuse("router_bias", "no router of this family has a bias")
        if values.raw("zero_expert_type") not in (None, "identity"):
            raise wrong("zero_expert_type", values.raw("zero_expert_type"), "identity")
        blocks, width = values.integer("num_hidden_layers"), values.integer("hidden_size")
        dense = latent_like("LongcatFlashForCausalLM", values)
        mixer = dense.layers[0].mixer
        assert isinstance(mixer, LatentAttentionSpec)
        queries, latents = (
            (width / values.integer(rank)) ** 0.5 if values.boolean(scales) else 1.0
            for rank, scales in (("q_lora_rank", "mla_scale_q_lora"), ("kv_lora_rank", "mla_scale_kv_lora"))
        )
        mixer = replace(mixer, scale=mixer.scale * queries, latent_scale=latents)
        first = replace(dense.layers[0], mixer=mixer)
        layers = (first, replace(first, late_addend=True)) * blocks
        mixtures = dict.fromkeys(range(0, 2 * blocks, 2), _mixture(values, dense))
        return replace(with_experts(replace(dense, layers=layers), mixtures), unused=_needless(values, blocks))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = outer(spec, "norm")
        for index, layer in enumerate(spec.layers):
            block, part = divmod(index, 2)
            ours, theirs = f"layers.{index}", f"model.layers.{block}"
            norms = {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
            found |= named(ours, theirs, {name: f"{stored}.{part}" for name, stored in norms.items()})
            assert isinstance(layer.mixer, LatentAttentionSpec)
            found |= mixer_weights(f"{ours}.mixer", f"{theirs}.self_attn.{part}", layer.mixer)
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= layer_experts(f"{ours}.feed_forward", theirs, layer.feed_forward, NAMES)
            else:
                parts = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
                found |= named(f"{ours}.feed_forward", f"{theirs}.mlps.{part}", parts)
        return found


def _mixture(config: Config, dense: ModelSpec) -> ExpertsSpec:
    """Return the experts, and the first layer's own feed-forward as their shared one."""
    idle, experts = config.integer("zero_expert_num", at_least=0), config.integer("n_routed_experts")
    how = routing(config.changed(n_routed_experts=experts + idle), correction=True)
    return ExpertsSpec(
        routing=replace(how, scale=config.number("routed_scaling_factor")),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        shared=dense.layers[0].mlp,
        idle=idle,
        late=True,
    )


def _needless(config: Config, blocks: int) -> tuple[str, ...]:
    """Return the beginnings of the names of what files may hold: a draft head, and halves of experts that compute
    nothing, which transformers writes."""
    first = config.integer("n_routed_experts")
    idle = range(first, first + config.integer("zero_expert_num", at_least=0))
    return ("model.mtp.", *(f"model.layers.{block}.mlp.experts.{each}." for block in range(blocks) for each in idle))
