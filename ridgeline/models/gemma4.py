"""Gemma 4: Gemma 3 with wider heads on its full layers, and experts, or inputs of single layers (E2B, E4B).

On full layers values may be keys. The last layers of E2B and E4B attend to the keys of earlier layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import (
    AttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    Source,
    WeightMap,
)
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.gemma_sounds import bounds, gemma4_listener, gemma4_listener_weights
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.names import named, single
from ridgeline.models.wrapped import text_config, text_spec, text_weights

DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
WIDTHS = ("head_dim", "num_key_value_heads")  # what may differ between layers
WINDOW_PATTERN = 6  # unless the checkpoint says otherwise, one layer in so many sees everything

# Of the inputs of single layers
INPUTS = {
    "table": "embed_tokens_per_layer",
    "project": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
INPUT = {
    "input_gate": "per_layer_input_gate",
    "input_project": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
}
UNHEARD = ("model.audio_tower.", "model.embed_audio.")
TOWERS = ("model.vision_tower.", "model.embed_vision.", *UNHEARD)
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
}
VISION_LAYER = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
    "mixer.out": "self_attn.o_proj.linear",
    "feed_forward.gate_up": "mlp.gate_proj.linear mlp.up_proj.linear",
    "feed_forward.down": "mlp.down_proj.linear",
}
CLIPPED = {
    "mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "mixer.out": "self_attn.o_proj",
    "feed_forward.gate_up": "mlp.gate_proj mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


class Gemma4:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("Gemma4ForCausalLM", config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = Llama.weights(spec)
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found[f"{ours}.scalar"] = (Source(name=f"{theirs}.layer_scalar"),)
            if layer.inputs is not None:
                found |= named(f"{ours}.layer_input", theirs, INPUT)
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= _experts(f"{ours}.feed_forward", theirs)
        return found | (named("layer_inputs", "model", INPUTS) if spec.layer_inputs is not None else {})


class Gemma4Multimodal:
    """The text model of a checkpoint that also has towers for images and, in small ones, for sounds."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        spec = _spec("Gemma4ForConditionalGeneration", text := text_config(config))
        vision = Config(Config(config).section("vision_config").entries, VISION)
        if not config.get("vision_config"):
            return text_spec(spec, TOWERS)
        heard = Config(config).section("audio_config")
        listener = gemma4_listener(heard, spec.hidden_size) if config.get("audio_config") is not None else None
        unused = UNHEARD if listener is None else ()
        spec = replace(text_spec(spec, unused), tower=_tower(vision, spec.hidden_size), listener=listener)
        if text.get("use_bidirectional_attention") != "vision":
            return spec
        windows = (
            replace(each, mixer=replace(each.attention, ahead=each.attention.window is not None))
            for each in spec.layers
        )
        return replace(spec, layers=tuple(windows), both_ways="pictures")

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = text_weights(Gemma4.weights(spec))
        found |= {} if spec.tower is None else _tower_weights(spec.tower)
        return found if spec.listener is None else found | gemma4_listener_weights(spec.listener)


def _tower(vision: Config, outputs: int) -> TowerSpec:
    """Return the tower: Gemma's layers with attention both ways, whose pairs rotate by columns and rows."""
    width, patch, heads = (vision.integer(name) for name in ("hidden_size", "patch_size", "num_attention_heads"))
    eps, head_dim = vision.number("rms_norm_eps"), vision.integer("head_dim")
    norm, rope = NormSpec(eps=eps), vision.section("rope_parameters")
    if rope.raw("rope_type") not in (None, "axial"):
        raise rope.wrong("rope_type", rope.raw("rope_type"), "axial")
    vision.refuse("attention_bias", "only maps without biases run")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=vision.integer("num_key_value_heads"),
        head_dim=head_dim,
        scale=1.0,
        qk_norm=norm,
        v_norm=True,
        rope=RopeSpec(theta=rope.number("rope_theta") if "rope_theta" in rope else 100.0, rotary_dim=head_dim),
        bidirectional=True,
    )
    activation = Config({"hidden_act": vision.raw("hidden_activation")}).activation("hidden_act")
    mlp = MLPSpec(intermediate_size=vision.integer("intermediate_size"), activation=activation)
    layer = LayerSpec(mixer=attention, feed_forward=mlp, norm=norm, norms="both")
    standardized = vision.boolean("standardize")
    projector = ProjectorSpec(
        outputs=outputs,
        merge=vision.integer("pooling_kernel_size"),
        joined="mean",
        standardized=standardized,
        # What is not standardized is multiplied by the root of the width alone, which only this number would notice
        norm=NormSpec(eps=eps if standardized else eps / width, weightless=True),
        norm_merged=True,
        bias=False,
    )
    return TowerSpec(
        width=width,
        patch_width=3 * patch**2,
        layers=(layer,) * vision.integer("num_hidden_layers"),
        projector=projector,
        grid=GridSpec(side=vision.integer("position_embedding_size"), fit="axes"),
        clipped=vision.boolean("use_clipped_linears"),
    )


def _tower_weights(tower: TowerSpec) -> WeightMap:
    theirs = "model.vision_tower"
    found: WeightMap = {
        "tower.patch.weight": (Source(name=f"{theirs}.patch_embedder.input_proj.weight"),),
        "tower.positions": (Source(name=f"{theirs}.patch_embedder.position_embedding_table"),),
    } | named("tower.projector", "model.embed_vision", {"down": "embedding_projection"})
    if tower.projector.standardized:
        found |= single("tower.projector", theirs, {"shift": "std_bias", "factor": "std_scale"})
    for index, layer in enumerate(tower.layers):
        ours, inner = f"tower.layers.{index}", f"{theirs}.encoder.layers.{index}"
        found |= named(ours, inner, VISION_LAYER)
        if tower.clipped:
            found |= bounds(ours, inner, CLIPPED)
        heads = {"q": layer.attention.num_heads, "k": layer.attention.num_kv_heads}
        found[f"{ours}.mixer.qkv.weight"] = tuple(
            Source(name=f"{inner}.self_attn.{each}_proj.linear.weight", axes=heads.get(each)) for each in "qkv"
        )
        for each in "qk":
            norm = Source(name=f"{inner}.self_attn.{each}_norm.weight", axes=1)
            found[f"{ours}.mixer.{each}_norm.weight"] = (norm,)
    return found


def _spec(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    activation = Config(config, DEFAULTS).raw("hidden_activation")
    values = Config({**config, "hidden_act": activation}, DEFAULTS)
    if values.raw("use_bidirectional_attention") != "vision":  # which means images, and there are none here
        values.refuse("use_bidirectional_attention", "only causal attention runs")

    @cache
    def alike(head_dim: int, kv_heads: int, window: int | None) -> ModelSpec:
        """Return a model all of whose layers are of one kind."""
        widths = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        one = Config({**config, "hidden_act": activation, **widths}, DEFAULTS)
        return llama_like(architecture, one, attention_bias=values.boolean("attention_bias"), windows=[window])

    kinds = _kinds(values)
    borrowed = lenders([window for _, _, window in kinds], values)
    inputs = layer_inputs(values, alike(*kinds[-1]))
    layers = tuple(
        replace(_layer(alike(*kind).layers[0], values, lender), inputs=inputs)
        for kind, lender in zip(kinds, borrowed, strict=True)
    )
    return replace(
        alike(*kinds[-1]),
        layers=layers,
        unused=needless(borrowed),
        embedding_multiplier=values.integer("hidden_size") ** 0.5,
        logits_softcap=values.number("final_logit_softcapping") if "final_logit_softcapping" in values else None,
    )


def _kinds(config: Config) -> list[tuple[int, int, int | None]]:
    """Return (head width, key/value heads, window) of every layer. The last one sees everything, whatever is said."""
    num_layers = config.integer("num_hidden_layers")
    types = config.layer_types(num_layers) or [
        "sliding_attention" if (layer + 1) % WINDOW_PATTERN else "full_attention" for layer in range(num_layers)
    ]
    own = _own_widths(config, num_layers) if "per_layer_config" in config else None
    wide = {"head_dim": config.integer("global_head_dim")}
    if config.boolean("attention_k_eq_v") and "num_global_key_value_heads" in config:
        wide["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    usual = {name: config.integer(name) for name in WIDTHS}
    kinds: list[tuple[int, int, int | None]] = []
    for index, kind in enumerate([*types[:-1], "full_attention"]):
        full = kind == "full_attention"
        widths = usual | ((wide if full else {}) if own is None else own.get(index, {}))
        window = None if full else config.integer("sliding_window")
        kinds.append((widths["head_dim"], widths["num_key_value_heads"], window))
    return kinds


def _own_widths(config: Config, num_layers: int) -> dict[int, dict[str, int]]:
    """Return the widths that `per_layer_config` gives to single layers, by their index, which transformers writes with
    leading zeros. Raise ModelLoadError for anything else that it sets, since no other entry differs between layers."""
    layers = config.section("per_layer_config", required=True)
    found = {}
    for key in config.raw("per_layer_config"):
        if not key.isdecimal() or int(key) >= num_layers:
            raise ModelLoadError(f"per_layer_config in config.json has {key!r}; the layers are 0 to {num_layers - 1}.")
        entries = layers.section(key, required=True)
        if others := [name for name in config.raw("per_layer_config")[key] if name not in WIDTHS]:
            raise ModelLoadError(
                f"per_layer_config in config.json sets {others[0]} of layer {key}; only {' and '.join(WIDTHS)} may "
                "differ."
            )
        found[int(key)] = {name: entries.integer(name) for name in WIDTHS if name in entries}
    return found


def lenders(windows: Sequence[int | None], config: Config) -> list[int | None]:
    """Return, for each layer, the earlier one to whose keys and values it attends: for the last `num_kv_shared_layers`
    the last one before them with the same window. Raise ModelLoadError if there is none."""
    count = len(windows)
    shared = config.integer("num_kv_shared_layers", at_least=0) if "num_kv_shared_layers" in config else 0
    own = windows[: count - shared]
    last = {window: layer for layer, window in enumerate(own)}
    if shared >= count or not {*windows} <= last.keys():
        raise wrong("num_kv_shared_layers", shared, "so few that a layer of each type has keys of its own")
    return [None if layer < count - shared else last[window] for layer, window in enumerate(windows)]


def needless(borrowed: Sequence[int | None]) -> tuple[str, ...]:
    """Return the beginnings of the names of what files may hold for layers that have no keys of their own."""
    layers = (layer for layer, lender in enumerate(borrowed) if lender is not None)
    return tuple(f"model.layers.{layer}.self_attn.{part}" for layer in layers for part in ("k_", "v_"))


def layer_inputs(config: Config, spec: ModelSpec) -> LayerInputsSpec | None:
    """Return the inputs of single layers, if the model has some."""
    if not config.raw("hidden_size_per_layer_input"):
        return None
    rows = config.integer("vocab_size_per_layer_input") if "vocab_size_per_layer_input" in config else spec.vocab_size
    return LayerInputsSpec(
        width=config.integer("hidden_size_per_layer_input"),
        rows=rows,
        known=rows,
        norm=spec.final_norm,
        given=config.integer("pad_token_id", at_least=0) if config.raw("pad_token_id") is not None else 0,
        activation=config.activation("hidden_act"),
    )


def _layer(layer: LayerSpec, config: Config, lender: int | None) -> LayerSpec:
    full = layer.attention.window is None
    mixer = replace(
        layer.attention,
        scale=1.0,
        qk_norm=layer.norm,
        v_norm=True,
        values_are_keys=full and config.boolean("attention_k_eq_v"),
        borrows=lender,
    )
    mlp = layer.mlp
    if lender is not None and config.boolean("use_double_wide_mlp"):
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    layer = replace(layer, mixer=mixer, feed_forward=mlp, norms="both", scalar=True)
    if not config.boolean("enable_moe_block"):
        return layer
    count, top_k = config.integer("num_experts"), config.integer("top_k_experts")
    if top_k > count:
        raise wrong("top_k_experts", top_k, f"at most the {count} of num_experts")
    experts = ExpertsSpec(
        routing=RoutingSpec(experts=count, top_k=top_k, renormalize=True, expert_scale=True),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        shared=layer.mlp,
        own_norms=layer.norm,
    )
    return replace(layer, feed_forward=experts)


def _experts(ours: str, theirs: str) -> WeightMap:
    stored = {
        "router": ("router.proj.weight",),
        "expert_scale": ("router.per_expert_scale",),
        "norms.router_norm.weight": ("router.scale",),
        "norms.pre_norm.weight": ("pre_feedforward_layernorm_2.weight",),
        "norms.post_norm.weight": ("post_feedforward_layernorm_2.weight",),
        "norms.shared_norm.weight": ("post_feedforward_layernorm_1.weight",),
        "gate_up.weight": ("experts.gate_up_proj",),
        "down.weight": ("experts.down_proj",),
        "shared.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "shared.down.weight": ("mlp.down_proj.weight",),
    }
    return {
        f"{ours}.{part}": tuple(Source(name=f"{theirs}.{name}", stacked="experts." in name) for name in names)
        for part, names in stored.items()
    }
