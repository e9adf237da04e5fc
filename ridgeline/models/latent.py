"""The shared parts of families with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.latent import IndexerSpec, LatentAttentionSpec
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import ExpertNames, expert_weights
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.rope import rope, score_scale

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
}
NAMES = ExpertNames(shared="mlp.shared_experts")


def latent_like(architecture: str, config: Config, *, interleaved: bool = True, mlp_bias: bool = False) -> ModelSpec:
    """Return a spec that is Llama's but for latent attention. Raise ModelLoadError if its numbers contradict each
    other."""
    if (width := config.integer("qk_rope_head_dim")) % 2:
        raise wrong("qk_rope_head_dim", width, "an even number, since pairs rotate")
    dense = llama_like(
        architecture,
        config.changed(head_dim=width, num_key_value_heads=None),
        mlp_bias=mlp_bias,
    )
    mixer = latent_attention(config, dense, interleaved=interleaved)
    return replace(dense, layers=tuple(replace(layer, mixer=mixer) for layer in dense.layers))


def latent_attention(config: Config, dense: ModelSpec, *, interleaved: bool) -> LatentAttentionSpec:
    """Return the mixer. dense: the model that it is for, whose norms it has."""
    key_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    query_rank = 0 if config.raw("q_lora_rank") is None else config.integer("q_lora_rank")
    bias = config.boolean("attention_bias")
    if bias and not query_rank:
        raise ModelLoadError("config.json sets attention_bias without q_lora_rank, which no known model does.")
    rotation = rope(config, rope_dim)
    if rotation.rotary_dim != rope_dim:
        raise ModelLoadError(
            f"config.json rotates {rotation.rotary_dim} of the {rope_dim} numbers of qk_rope_head_dim, all of which "
            "rotate in models with latent attention; leave partial_rotary_factor out."
        )
    return LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads"),
        key_dim=key_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        rank=config.integer("kv_lora_rank"),
        query_rank=query_rank,
        scale=(key_dim + rope_dim) ** -0.5 * score_scale(config),
        norm=replace(dense.final_norm, eps=1e-6),
        rope=rotation,
        bias=bias,
        interleaved=interleaved,
    )


def with_indexer(
    spec: ModelSpec, config: Config, *, interleaved: bool, shared: Collection[int] = frozenset()
) -> ModelSpec:
    """Return the spec with an indexer in every layer's latent attention.

    interleaved: two neighbouring numbers of the indexer's queries and keys rotate as a pair.
    shared: the layers that take the choice of the layer before them that is none of these.
    """
    indexer = IndexerSpec(
        selected=config.integer("index_topk"),
        heads=config.integer("index_n_heads"),
        dim=config.integer("index_head_dim"),
        interleaved=interleaved,
    )
    layers, chooser = [], 0
    for number, layer in enumerate(spec.layers):
        mixer = layer.mixer
        assert isinstance(mixer, LatentAttentionSpec)
        if not mixer.query_rank:
            raise wrong("q_lora_rank", None, "a number, since the indexer makes its queries of it")
        if indexer.dim < mixer.rope_dim:
            raise wrong("index_head_dim", indexer.dim, f"at least {mixer.rope_dim} (qk_rope_head_dim), which rotate")
        chooser = chooser if number in shared else number
        takes = chooser if number in shared else None
        layers.append(replace(layer, mixer=replace(mixer, indexer=indexer, chooser=takes)))
    return replace(spec, layers=tuple(layers))


def latent_weights(spec: ModelSpec, names: ExpertNames = NAMES) -> WeightMap:
    """Return the weight map of a model that is Llama but for latent attention and experts."""
    found = expert_weights(spec, names)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, LatentAttentionSpec):
            found |= mixer_weights(f"layers.{index}.mixer", f"model.layers.{index}.self_attn", layer.mixer)
    return found


def mixer_weights(ours: str, theirs: str, spec: LatentAttentionSpec) -> WeightMap:
    """Return the weight map of one layer's latent attention."""
    first = "q_a_proj" if spec.query_rank else "q_proj"
    found: WeightMap = {}
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        parts = (first, "kv_a_proj_with_mqa")
        found[f"{ours}.latent_in.{kind}"] = tuple(Source(name=f"{theirs}.{part}.{kind}") for part in parts)
        found[f"{ours}.out.{kind}"] = (Source(name=f"{theirs}.o_proj.{kind}"),)
    named = {"latent_norm": "kv_a_layernorm", "expand": "kv_b_proj"}
    if spec.query_rank:
        named |= {"query_norm": "q_a_layernorm", "query": "q_b_proj"}
    if spec.own_indexer is not None:
        for name, each in (("query", "wq_b"), ("key", "wk"), ("weights", "weights_proj"), ("norm", "k_norm")):
            named[f"indexer.{name}"] = f"indexer.{each}"
        found[f"{ours}.indexer.norm.bias"] = (Source(name=f"{theirs}.indexer.k_norm.bias"),)
    return found | {f"{ours}.{name}.weight": (Source(name=f"{theirs}.{each}.weight"),) for name, each in named.items()}
