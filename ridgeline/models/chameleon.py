"""Chameleon: Llama with a LayerNorm of each query and key head, whose pictures are tokens, by a VQ-VAE's codes.

Its larger size has its norms behind attention and feed-forward ("Swin"). Tokens of pictures are read and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.coded import CodedTowerSpec, flat
from ridgeline.core.specs.model import ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
CODES: dict[str, Any] = {
    "embed_dim": 256,
    "num_embeddings": 8192,
    "latent_channels": 256,
    "resolution": 512,
    "in_channels": 3,
    "base_channels": 128,
    "channel_multiplier": [1, 1, 2, 2, 4],
    "num_res_blocks": 2,
    "attn_type": "vanilla",
}
HEAD_EPS = 1e-5  # of queries' and keys' norms, which config.json does not have
SWIN = Names(norms={"mixer_post_norm": "input_layernorm", "feed_forward_post_norm": "post_attention_layernorm"})
TOWER = "model.vqmodel"
NAMED = "IMGIMG"  # begins the names of codes' tokens. Letters A to J follow, which are digits, and a Z


class Chameleon:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        bias, mlp_bias = values.boolean("attention_bias"), values.boolean("mlp_bias")
        own = llama_like("ChameleonForConditionalGeneration", values, attention_bias=bias, mlp_bias=mlp_bias)
        norm = NormSpec(kind="layer", eps=HEAD_EPS)
        place = "after" if values.boolean("swin_norm") else "before"
        own = changed(own, {"qk_norm": norm, "qk_norm_apart": True}, norms=place)
        tokens = _tokens(values, own.vocab_size)
        tower = _tower(Config(values.section("vq_config").entries, CODES), own.hidden_size, tokens)
        unused = f"{TOWER}.post_quant_conv.", f"{TOWER}.decoder."
        return replace(own, tower=tower, unwritten=tuple(sorted(tokens.values())), unused=(*own.unused, *unused))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        tower = spec.tower
        assert isinstance(tower, CodedTowerSpec)
        found = decoder_weights(spec, SWIN if spec.layers[0].norms == "after" else Names())
        for index, layer in enumerate(spec.layers):
            for norm in ("q_norm", "k_norm"):
                for kind in ("weight", "bias"):
                    [source] = found[name := f"layers.{index}.mixer.{norm}.{kind}"]
                    found[name] = (replace(source, columns=layer.attention.head_dim),)
        found["tower.book"] = (Source(name=f"{TOWER}.quantize.embedding.weight"),)
        for each in tower.convolutions:
            ours, theirs = f"tower.filters.{flat(each.name)}", _stored(each.name)
            found[f"{ours}.weight"] = (Source(name=f"{theirs}.weight", kernel=(each.taps, each.taps)),)
            found[f"{ours}.bias"] = (Source(name=f"{theirs}.bias"),)
        for name, _ in tower.group_norms:
            for kind in ("weight", "bias"):
                found[f"tower.norms.{flat(name)}.{kind}"] = (Source(name=f"{_stored(name)}.{kind}"),)
        return found


def _stored(name: str) -> str:
    return f"{TOWER}.{name}" if name == "quant_conv" else f"{TOWER}.encoder.{name}"


def _tokens(values: Config, vocabulary: int) -> dict[int, int]:
    """Return the tokens of codes, by the codes' numbers."""
    named = values.raw("vocabulary_map")
    if not isinstance(named, Mapping):
        raise ModelLoadError("config.json has no vocabulary_map, which says which tokens are codes of pictures.")
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    found = {}
    for name, token in named.items():
        if not name.startswith(NAMED):
            continue
        number = name[len(NAMED) : -1].translate(digits)
        if not number.isdecimal() or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise values.wrong("vocabulary_map", {name: token}, f"numbered codes with tokens below {vocabulary}")
        found[int(number)] = token
    return found


def _tower(vision: Config, outputs: int, tokens: Mapping[int, int]) -> CodedTowerSpec:
    vision.refuse("double_latent", "the encoder's output has no second half here")
    if vision.integer("in_channels") != 3:
        raise vision.wrong("in_channels", vision.integer("in_channels"), "3, as pictures have red, green and blue")
    codes, multiples = vision.integer("num_embeddings"), vision.raw("channel_multiplier")
    if (lacking := next((code for code in range(codes) if code not in tokens), None)) is not None:
        raise ModelLoadError(f"config.json has no token for code {lacking} of {codes} in vocabulary_map.")
    if not isinstance(multiples, (list, tuple)) or not 0 < len(multiples) <= 8:
        raise vision.wrong("channel_multiplier", multiples, "a list of 1 to 8 numbers")
    first, resolution = vision.integer("base_channels"), vision.integer("resolution")
    channels = tuple(first * Config({"channel_multiplier": each}).integer("channel_multiplier") for each in multiples)
    if odd := [width for width in (first, *channels) if width % 32]:
        raise vision.wrong("base_channels", odd[0], "multiples of 32, the groups of its norms")
    patch = 1 << (len(channels) - 1)
    if resolution % patch:
        raise vision.wrong("resolution", resolution, f"a multiple of {patch}, the pixels of a patch")
    sees, resolutions = vision.raw("attn_type") == "vanilla", vision.raw("attn_resolutions") or ()
    return CodedTowerSpec(
        width=channels[-1],
        patch_width=3 * patch**2,
        layers=(),
        projector=ProjectorSpec(outputs=outputs, absent=True),
        grid=GridSpec(side=resolution // patch),
        side=resolution // patch,
        first=first,
        channels=channels,
        blocks=vision.integer("num_res_blocks"),
        seeing=tuple(n for n in range(len(channels)) if sees and resolution >> n in resolutions),
        middle_sees=sees,
        latent=vision.integer("latent_channels"),
        code_width=vision.integer("embed_dim"),
        tokens=tuple(tokens[code] for code in range(codes)),
    )
