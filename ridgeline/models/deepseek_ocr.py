"""DeepSeek-OCR: DeepSeek's first mixture behind Segment Anything's encoder, whose output another tower reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.sam import SHRINKS, ReaderSpec, SamTowerSpec
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec
from ridgeline.models.clip import vit_layers
from ridgeline.models.config import Config
from ridgeline.models.deepseek import NAMES
from ridgeline.models.experts import (
    expert_weights,
    later_layers,
    routing,
    shared_experts,
    typed_layers,
    with_experts,
)
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.names import named, single, square_patches
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.wrapped import text_config

TEXT = {
    **LLAMA_DEFAULTS,
    **{"first_k_dense_replace": 0, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"topk_method": "greedy", "routed_scaling_factor": 1.0, "moe_intermediate_size": 1407},
}
SAM: dict[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4.0},
    **{"image_size": 1024, "patch_size": 16, "window_size": 14, "output_channels": 256, "hidden_act": "gelu"},
    **{"layer_norm_eps": 1e-6, "use_abs_pos": True, "use_rel_pos": True, "qkv_bias": True, "num_channels": 3},
    "global_attn_indexes": [2, 5, 8, 11],
}
CLIP: dict[str, Any] = {
    **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    **{"image_size": 224, "patch_size": 14, "hidden_act": "quick_gelu"},
}
ENCODER = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}
LAYER = {
    **{"mixer_norm": "norm1", "mixer.qkv": "attn.qkv", "mixer.out": "attn.proj"},
    **{"feed_forward_norm": "norm2", "feed_forward.up": "mlp.lin1", "feed_forward.down": "mlp.lin2"},
}
FILTERS = "neck.0", "neck.2", "net_2", "net_3"
QUERIES = (144, 256)  # of views of 768 and of 1,024 pixels


class DeepseekOcr:
    """The first one, whose reader is CLIP's tower. Its own code names all of its sizes."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        own = Config(config).section("language_config").entries
        text = Config({**config, **own}, TEXT)
        if text.boolean("use_mla"):
            raise text.wrong("use_mla", True, "false, as in every DeepSeek-OCR")
        towers = Config(config).section("vision_config").section("width")
        given = towers.section("sam_vit_b")
        names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
        sam = _renamed(given, names, {**SAM, "downsample_channels": [512, 1024]})
        sam = sam.changed(image_size=Config(config).section("vision_config").raw("image_size") or SAM["image_size"])
        clip = _renamed(towers.section("clip-l-14-224"), names, CLIP)
        clip = clip.changed(intermediate_size=4 * clip.integer("hidden_size"))
        norm = NormSpec(kind="layer", eps=1e-5)
        reader = ReaderSpec(
            width=clip.integer("hidden_size"),
            layers=vit_layers(clip, norm, clip.integer("num_hidden_layers")),
            side=clip.integer("image_size") // clip.integer("patch_size"),
            embed_norm=norm,
        )
        spec = _text("DeepseekOCRForCausalLM", text)
        unused = (
            *spec.unused,
            "model.vision_model.embeddings.patch_embedding.",
            "model.vision_model.embeddings.position_ids",
        )
        return replace(spec, tower=_tower(sam, reader, spec.hidden_size, lined=True), unused=unused)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert isinstance(spec.tower, SamTowerSpec)
        clip = "model.vision_model"
        found = _weights(spec, spec.tower) | {
            "tower.reader.class_token": (Source(name=f"{clip}.embeddings.class_embedding"),),
            "tower.reader.positions": (Source(name=f"{clip}.embeddings.position_embedding.weight"),),
            "tower.ends.1": (Source(name="model.image_newline"),),
        }
        found |= named("tower.reader", clip, {"embed_norm": "pre_layrnorm"}, bias=True)
        layer = {
            **{"mixer_norm": "layer_norm1", "mixer.qkv": "self_attn.qkv_proj", "mixer.out": "self_attn.out_proj"},
            **{"feed_forward_norm": "layer_norm2", "feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2"},
        }
        for index in range(len(spec.tower.reader.layers)):
            ours, theirs = f"tower.reader.layers.{index}", f"{clip}.transformer.layers.{index}"
            found |= named(ours, theirs, layer, bias=True)
        return found


class DeepseekOcr2:
    """The second one, whose reader is Qwen2's layers with a learned query for each place, in transformers' form."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        vision = Config(config).section("vision_config")
        sam = vision.section("sam_config").filled({**SAM, "downsample_channels": [512, 896]})
        encoder = vision.section("encoder_config").filled(ENCODER)
        if encoder.boolean("use_sliding_window"):
            raise encoder.wrong("use_sliding_window", True, "false, as in every DeepSeek-OCR 2")
        seen = Qwen2.spec(encoder.entries)
        reader = ReaderSpec(
            width=seen.hidden_size,
            layers=tuple(replace(each, mixer=replace(each.attention, bidirectional=True)) for each in seen.layers),
            queries=QUERIES,
            final_norm=seen.final_norm,
        )
        spec = _text("DeepseekOcr2ForConditionalGeneration", Config(text_config(config), TEXT))
        return replace(spec, tower=_tower(sam, reader, spec.hidden_size, lined=False))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert isinstance(spec.tower, SamTowerSpec)
        encoder = "model.qwen2_model"
        inner = f"{encoder}.model.model"
        found = _weights(spec, spec.tower) | {
            "tower.reader.queries.0": (Source(name=f"{encoder}.query_768.weight"),),
            "tower.reader.queries.1": (Source(name=f"{encoder}.query_1024.weight"),),
        }
        found |= named("tower.reader", inner, {"final_norm": "norm"})
        qkv = {"mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"}
        others = {
            **{"mixer_norm": "input_layernorm", "mixer.out": "self_attn.o_proj"},
            **{"feed_forward_norm": "post_attention_layernorm", "feed_forward.down": "mlp.down_proj"},
            "feed_forward.gate_up": "mlp.gate_proj mlp.up_proj",
        }
        for index in range(len(spec.tower.reader.layers)):
            ours, theirs = f"tower.reader.layers.{index}", f"{inner}.layers.{index}"
            found |= named(ours, theirs, qkv, bias=True) | named(ours, theirs, others)
        return found


def _renamed(config: Config, names: Mapping[str, str], defaults: Mapping[str, Any]) -> Config:
    """Return a section under the names that other configs have for its entries, with defaults."""
    own = {names.get(name, name): value for name, value in config.entries.items() if value is not None}
    return Config({**defaults, **own})


def _text(architecture: str, values: Config) -> ModelSpec:
    """Return the text model: Llama with experts, whose weights are not normalized, in its later layers."""
    if values.raw("topk_method") != "greedy":
        raise values.wrong("topk_method", values.raw("topk_method"), "greedy")
    values.refuse("mlp_bias", "only feed-forwards without biases run")
    dense = llama_like(architecture, values, attention_bias=values.boolean("attention_bias"))
    scaled = values.changed(expert_weights_scale=values.number("routed_scaling_factor"))
    experts = ExpertsSpec(
        routing=routing(scaled, renormalize=values.boolean("norm_topk_prob")),
        intermediate_size=values.integer("moe_intermediate_size"),
        activation=values.activation("hidden_act"),
        shared=shared_experts(values),
    )
    typed = typed_layers(values)
    return with_experts(dense, dict.fromkeys(later_layers(values) if typed is None else typed, experts))


def _tower(sam: Config, reader: ReaderSpec, outputs: int, *, lined: bool) -> SamTowerSpec:
    for name in ("use_abs_pos", "use_rel_pos", "qkv_bias"):
        if not sam.boolean(name):
            raise sam.wrong(name, False, "true, as in every DeepSeek-OCR")
    width, patch, image = (sam.integer(name) for name in ("hidden_size", "patch_size", "image_size"))
    side, window = image // patch, sam.integer("window_size")
    if image % patch or side % SHRINKS or side > 256:
        raise sam.wrong("image_size", image, f"a multiple of {SHRINKS} patches of {patch} pixels, and at most 256")
    if window > side:
        raise sam.wrong("window_size", window, f"at most the {side} patches of a view's side")
    count, whole, halved = (
        sam.integer("num_hidden_layers"),
        sam.raw("global_attn_indexes"),
        sam.raw("downsample_channels"),
    )
    if not isinstance(whole, (list, tuple)) or any(type(each) is not int or not 0 <= each < count for each in whole):
        raise sam.wrong("global_attn_indexes", whole, f"a list of numbers of the {count} layers")
    if not isinstance(halved, (list, tuple)) or len(halved) != 2:
        raise sam.wrong("downsample_channels", halved, "a list of two numbers")
    first, second = (Config({"channels": each}).integer("channels") for each in halved)
    if second != reader.width:
        raise sam.wrong("downsample_channels", second, f"{reader.width} as the last one, the reader's width")
    wide = sam.changed(intermediate_size=sam.raw("mlp_dim") or int(width * sam.number("mlp_ratio")))
    norm = NormSpec(kind="layer", eps=sam.number("layer_norm_eps"))
    layers = vit_layers(wide, norm, count)

    def seeing(layer: LayerSpec, places: int) -> LayerSpec:
        return replace(layer, mixer=replace(layer.attention, grid=places))

    return SamTowerSpec(
        width=width,
        patch_width=3 * patch**2,
        patch_bias=True,
        layers=tuple(seeing(layer, side if index in whole else window) for index, layer in enumerate(layers)),
        projector=ProjectorSpec(outputs=outputs, merge=SHRINKS, joined="mean"),
        grid=GridSpec(side=side, fit="cubic"),
        window=window,
        whole=tuple(whole),
        neck=sam.integer("output_channels"),
        halved=(first, second),
        reader=reader,
        newline=True,
        lined=lined,
    )


def _weights(spec: ModelSpec, tower: SamTowerSpec) -> WeightMap:
    """Return the weight map of the text model, of Segment Anything's encoder, and of the projector."""
    sam = "model.sam_model"
    found = expert_weights(spec, NAMES) | {
        "tower.patch.weight": square_patches(tower, f"{sam}.patch_embed.proj.weight"),
        "tower.patch.bias": (Source(name=f"{sam}.patch_embed.proj.bias"),),
        "tower.positions": (Source(name=f"{sam}.pos_embed", row=1, columns=tower.grid_side),),
        "tower.ends.0": (Source(name="model.view_seperator"),),  # sic
    }
    found |= named("tower", "model.projector", {"down": "layers"}, bias=True)
    found |= named("tower.neck_norms", sam, {"0": "neck.1", "1": "neck.3"}, bias=True)
    for number, (name, (_, _, taps, _)) in enumerate(zip(FILTERS, tower.convolutions, strict=True)):
        found[f"tower.filters.{number}"] = (Source(name=f"{sam}.{name}.weight", kernel=(taps, taps)),)
    for index in range(len(tower.layers)):
        ours, theirs = f"tower.layers.{index}", f"{sam}.blocks.{index}"
        found |= named(ours, theirs, LAYER, bias=True)
        found |= single(ours, theirs, {"mixer.grid_rows": "attn.rel_pos_h", "mixer.grid_columns": "attn.rel_pos_w"})
    return found
