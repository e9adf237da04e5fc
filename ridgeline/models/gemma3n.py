"""Gemma 3n (no pictures): four residual streams, layers with inputs and keys of others, and sparse feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec, Source, StreamsSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.gemma4 import INPUT, INPUTS, TOWERS, UNHEARD, layer_inputs, lenders, needless
from ridgeline.models.gemma_sounds import gemma3n_listener, gemma3n_listener_weights
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.names import named, single
from ridgeline.models.windows import listed_windows
from ridgeline.models.wrapped import text_config, text_spec, text_weights

DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
WINDOW_PATTERN = 5  # unless the checkpoint says otherwise, one layer in so many sees everything
SPARSE = 10, 0.95  # unless it does, so many layers of a larger model are so sparse
MOST_STREAMS = 64
_ALTUP = {
    "router": "altup.modality_router.weight",
    "predict": "altup.prediction_coefs.weight",
    "correct": "altup.correction_coefs.weight",
    "corrected_scale": "altup.correct_output_scale",
}
_MODULES = {
    "laurel_in": "laurel.linear_left",
    "laurel_out": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    "router_norm": "altup.router_norm",
}


class Gemma3n:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("Gemma3nForCausalLM", config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = Llama.weights(spec) | named("layer_inputs", "model", INPUTS)
        for index in range(len(spec.layers)):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(f"{ours}.layer_input", theirs, INPUT) | named(ours, theirs, _MODULES)
            found |= single(ours, theirs, _ALTUP)
        others = range(0 if spec.streams is None else spec.streams.count - 1)
        for name, stored in (("spread", "altup_projections"), ("merge", "altup_unembed_projections")):
            found[f"streams.{name}"] = tuple(Source(name=f"model.{stored}.{other}.weight") for other in others)
        return found


class Gemma3nMultimodal:
    """The text model of a checkpoint that also has towers for images, which are not built, and for sounds."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        spec = _spec("Gemma3nForConditionalGeneration", text_config(config))
        if config.get("audio_config") is None:
            return text_spec(spec, TOWERS)
        unused = tuple(name for name in TOWERS if name not in UNHEARD)
        listener = gemma3n_listener(Config(config), spec.hidden_size)
        return replace(text_spec(spec, unused), listener=listener)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = text_weights(Gemma3n.weights(spec))
        return found if spec.listener is None else found | gemma3n_listener_weights(spec.listener)


def _spec(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    values = Config(config, DEFAULTS)
    count = values.integer("num_hidden_layers")
    sizes = _per_layer(values, "intermediate_size", count)
    values = values.changed(intermediate_size=sizes[0], hidden_act=values.raw("hidden_activation"))
    if "rope_parameters" not in values:
        scaling = values.section("rope_scaling").entries
        thetas = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        rotations = {kind: {**scaling, "rope_theta": values.number(name)} for kind, name in thetas.items()}
        values = values.changed(rope_parameters=rotations)
    types = values.layer_types(count) or [
        "sliding_attention" if (layer + 1) % WINDOW_PATTERN else "full_attention" for layer in range(count)
    ]
    windows = listed_windows(types, values.integer("sliding_window"))
    dense = llama_like(
        architecture, values, qk_norm=True, windows=windows, attention_bias=values.boolean("attention_bias")
    )
    borrowed, inputs, streams = lenders(windows, values), layer_inputs(values, dense), _streams(values)
    if inputs is None:
        raise wrong("hidden_size_per_layer_input", 0, "above 0, since layers of this family have inputs of their own")
    rows = zip(dense.layers, borrowed, sizes, _sparsities(values, count), strict=True)

    def layer(old: LayerSpec, lender: int | None, size: Any, sparsity: float) -> LayerSpec:
        mixer = replace(old.attention, scale=1.0, v_norm=True, borrows=lender)
        width = Config({"intermediate_size": size}).integer("intermediate_size")
        mlp = replace(old.mlp, intermediate_size=width, sparsity=sparsity)
        return replace(old, mixer=mixer, feed_forward=mlp, norms="both", inputs=inputs, streams=streams)

    return replace(
        dense,
        layers=tuple(layer(*row) for row in rows),
        unused=needless(borrowed),
        embedding_multiplier=values.integer("hidden_size") ** 0.5,
        logits_softcap=values.number("final_logit_softcapping") if "final_logit_softcapping" in values else None,
    )


def _streams(config: Config) -> StreamsSpec:
    count, active = config.integer("altup_num_inputs", at_least=2), config.integer("altup_active_idx", at_least=0)
    if count > MOST_STREAMS:
        raise wrong("altup_num_inputs", count, f"at most {MOST_STREAMS}")
    if active >= count:
        raise wrong("altup_active_idx", active, f"below the {count} of altup_num_inputs")
    rank, scaled = config.integer("laurel_rank"), config.boolean("altup_correct_scale")
    return StreamsSpec(count=count, active=active, rank=rank, scaled=scaled)


def _per_layer(config: Config, name: str, count: int) -> list[Any]:
    """Return a value for each layer. Files list them, or have one for all."""
    value = config.raw(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise wrong(name, value, f"a list with an entry for each of the {count} layers")
    return value


def _sparsities(config: Config, count: int) -> list[float]:
    first, share = SPARSE
    if config.raw("activation_sparsity_pattern") is None:
        return [share if layer < first < count else 0.0 for layer in range(count)]
    found = _per_layer(config, "activation_sparsity_pattern", count)
    if any(type(each) not in (int, float) or not 0 <= each < 1 for each in found):
        raise wrong("activation_sparsity_pattern", found, "shares from 0 to less than 1")
    return [float(each) for each in found]
