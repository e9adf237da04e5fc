"""The sounds of Gemma 3n, and of Gemma 4 E2B and E4B: a conformer whose positions hear those just before them."""

from __future__ import annotations

from math import exp, log, log1p
from typing import Any

from ridgeline.core.specs.conformer import GluConvSpec, NearAttentionSpec
from ridgeline.core.specs.listener import ListenerSpec, MarksSpec
from ridgeline.core.specs.model import ABSENT, LayerSpec, MLPSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.spectra import GEMMA_3N, GEMMA_4
from ridgeline.core.specs.stem import TAPS, GridStem
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.models.config import Config
from ridgeline.models.names import named, single

AUDIO: dict[str, Any] = {
    **{"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu"},
    **{"subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "residual_weight": 0.5},
    **{"attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0},
    **{"attention_logit_cap": 50.0, "use_clipped_linears": True, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10},
    "output_proj_dims": 1536,
}
SUBSAMPLED: dict[str, Any] = {  # of Gemma 3n
    **{"sscp_conv_kernel_size": [[3, 3], [3, 3]], "sscp_conv_stride_size": [[2, 2], [2, 2]]},
    **{"sscp_conv_group_norm_eps": 1e-3, "conf_reduction_factor": 4, "input_feat_size": 128},
    **{"vocab_size": 128, "vocab_offset": 262_272},
}
ALONE = "sscp_conv_kernel_size", "sscp_conv_stride_size"  # what every Gemma 3n has
FILLED = 188  # vectors of every sound
LONGEST = 30  # seconds
PARTS = 4  # layers of ours that are one of the checkpoint's: feed-forward, attention, convolution, feed-forward
NORM = NormSpec(eps=1e-6)
FED = {"feed_forward_norm": "pre_layer_norm", "feed_forward_post_norm": "post_layer_norm"}
MAPS = {"feed_forward.up": "ffw_layer_1", "feed_forward.down": "ffw_layer_2"}
ATTENTION = {"mixer_norm": "norm_pre_attn", "mixer_post_norm": "norm_post_attn"}
ATTENDED = {"mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mixer.out": "self_attn.post"}
ATTENTION_3N = {
    "mixer_norm": "pre_attn_norm",
    "mixer_post_norm": "post_norm",
    "mixer.qkv": "attn.q_proj attn.k_proj attn.v_proj",
    "mixer.out": "post",
    "mixer.distances": "attn.relative_position_embedding.pos_proj",
}
CONVOLUTION = {"mixer_norm": "lconv1d.pre_layer_norm", "mixer.norm": "lconv1d.conv_norm"}
CONVOLVED = {"mixer.glu_in": "lconv1d.linear_start", "mixer.out": "lconv1d.linear_end"}


def gemma4_listener(config: Config, outputs: int) -> ListenerSpec:
    """Return the listener. outputs: the numbers of a vector."""
    values = config.filled(AUDIO)
    width, heads, channels = _checked(values)
    norm = NormSpec(eps=values.number("rms_norm_eps"))
    stem = GridStem(
        bands=GEMMA_4.bands,
        positions=LONGEST * RATE // HOP,
        channels=channels,
        spectra=GEMMA_4,
        activation="relu",
        norm=NormSpec(kind="layer", eps=norm.eps, biasless=True),
        bias=False,
        frames_first=True,
        channels_last=True,
    )
    if (read := channels[0] // 4 * channels[1]) != channels[1] * stem.rows:
        raise values.wrong(
            "subsampling_conv_channels", channels, f"{4 * stem.rows} first, since {read} numbers are read"
        )
    return ListenerSpec(
        stem=stem,
        width=width,
        layers=_block(values, width, heads, norm) * values.integer("num_hidden_layers"),
        norm=None,
        outputs=outputs,
        longest=LONGEST * RATE // HOP,
        pooled=1,
        block=PARTS,
        block_norm=NORM,
        clipped=values.boolean("use_clipped_linears"),
        hidden=values.integer("output_proj_dims"),
        between=NormSpec(eps=norm.eps, weightless=True),
        out_bias=False,
    )


def _block(values: Config, width: int, heads: int, norm: NormSpec, *, own: bool = False) -> tuple[LayerSpec, ...]:
    """Return the layers of one of the checkpoint's. own: a position hears so many before it besides itself, and keys
    are not scaled (Gemma 3n)."""
    before, chunk = values.integer("attention_context_left", at_least=2) - 1, values.integer("attention_chunk_size")
    if before != chunk:  # the distances whose vectors are projected would be others
        raise values.wrong("attention_context_left", before + 1, f"{chunk + 1}, one more than attention_chunk_size")
    if before > 1024:
        raise values.wrong("attention_context_left", before + 1, "at most 1025")
    attention = NearAttentionSpec(
        num_heads=heads,
        head_dim=width // heads,
        window=before + own,
        softcap=values.number("attention_logit_cap"),
        key_scale=1.0 if own else log1p(exp(1)) / log(2),
    )
    convolution = GluConvSpec(channels=width, length=values.integer("conv_kernel_size"), norm=norm)
    mlp = MLPSpec(intermediate_size=4 * width, gated=False)
    fed = LayerSpec(
        mixer=ABSENT, feed_forward=mlp, norm=NORM, norms="both", residual_multiplier=values.number("residual_weight")
    )
    return (
        fed,
        LayerSpec(mixer=attention, feed_forward=ABSENT, norm=NORM, norms="both"),
        LayerSpec(mixer=convolution, feed_forward=ABSENT, norm=norm),
        fed,
    )


def gemma3n_listener(whole: Config, outputs: int) -> ListenerSpec:
    """Return the listener of Gemma 3n. whole: the config of the whole model. outputs: the numbers of a vector."""
    names = {f"conf_{name}": name for name in AUDIO} | {
        "conf_num_hidden_layers": "num_hidden_layers",
        "conf_num_attention_heads": "num_attention_heads",
        "conf_attention_logit_cap": "attention_logit_cap",
        "sscp_conv_channel_size": "subsampling_conv_channels",
        "conf_conv_kernel_size": "conv_kernel_size",
        "conf_residual_weight": "residual_weight",
    }
    given = whole.section("audio_config").entries
    own = {names.get(name, name): value for name, value in given.items() if value is not None}
    values = Config({**AUDIO, "hidden_size": 1536, **SUBSAMPLED, **own})
    for name, wanted in SUBSAMPLED.items():
        if name in ALONE and repr(values.raw(name)).replace("(", "[").replace(")", "]") != repr(wanted):
            raise values.wrong(name, values.raw(name), f"{wanted}")
    width, heads, channels = _checked(values)
    norm, reduced = NormSpec(eps=values.number("rms_norm_eps")), values.integer("conf_reduction_factor")
    stem = GridStem(
        bands=values.integer("input_feat_size"),
        positions=LONGEST * RATE // HOP,
        channels=channels,
        spectra=GEMMA_3N.with_bands(values.integer("input_feat_size")),
        activation="relu",
        cumulative=values.number("sscp_conv_group_norm_eps"),
        bias=False,
        frames_first=True,
        channels_last=True,
    )
    filled = whole.integer("audio_soft_tokens_per_image") if "audio_soft_tokens_per_image" in whole else FILLED
    most = -(-stem.positions_of(stem.frames_of(LONGEST * RATE)) // reduced)
    if filled < most:
        raise whole.wrong("audio_soft_tokens_per_image", filled, f"at least {most}, those of {LONGEST} s")
    first, rows = values.integer("vocab_offset"), values.integer("vocab_size")
    end = (whole.integer("eoa_token_id") if "eoa_token_id" in whole else first) - first
    filler = whole.section("text_config").integer("vocab_size") - 1 - first
    for name, row in (("eoa_token_id", end), ("vocab_size", filler)):
        if not 0 <= row < rows:
            raise values.wrong(name, row + first, f"within the {rows} tokens of sounds from {first} on")
    return ListenerSpec(
        stem=stem,
        width=width,
        layers=_block(values, width, heads, norm, own=True) * values.integer("num_hidden_layers"),
        norm=norm,
        outputs=outputs,
        longest=LONGEST * RATE // HOP,
        pooled=1,
        block=PARTS,
        block_norm=NORM,
        out_bias=False,
        behind=NormSpec(eps=norm.eps, weightless=True),
        every=reduced,
        marks=MarksSpec(rows=rows, norm=norm, filled=filled, filler=filler, end=end),
    )


def _checked(values: Config) -> tuple[int, int, tuple[int, ...]]:
    """Return the width, the heads and the channels. Raise ModelLoadError for what does not run."""
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    if width % (2 * heads):
        raise values.wrong("hidden_size", width, f"a multiple of two times the {heads} of num_attention_heads")
    if values.raw("hidden_act") != "silu":
        raise values.wrong("hidden_act", values.raw("hidden_act"), "silu")
    if values.raw("attention_context_right") != 0:
        raise values.wrong("attention_context_right", values.raw("attention_context_right"), "0")
    if values.number("gradient_clipping") < 1e10:
        raise values.wrong("gradient_clipping", values.number("gradient_clipping"), "at least 1e10")
    channels = values.raw("subsampling_conv_channels")
    if not isinstance(channels, (list, tuple)) or len(channels) != 2:
        raise values.wrong("subsampling_conv_channels", channels, "a list of two numbers")
    return width, heads, tuple(Config({"channels": each}).integer("channels") for each in channels)


def gemma3n_listener_weights(listener: ListenerSpec) -> WeightMap:
    """Return the weight map of the listener of Gemma 3n."""
    tower, embed = "model.audio_tower", "model.embed_audio"
    stem = f"{tower}.subsample_conv_projection"
    found = named("listener.stem", stem, {"out": "input_proj_linear"})
    found |= named("listener", embed, {"projector": "embedding_projection", "norm": "soft_embedding_norm"})
    found |= named("listener", embed, {"marks_norm": "hard_embedding_norm"})
    found["listener.marks"] = (Source(name=f"{embed}.embedding.weight"),)
    for n in range(2):
        found[f"listener.stem.convs.{n}.weight"] = (Source(name=f"{stem}.conv_{n}.conv.weight", kernel=(TAPS, TAPS)),)
        found[f"listener.stem.convs.{n}.scale"] = (Source(name=f"{stem}.conv_{n}.norm.weight"),)
    mixer = listener.layers[2].mixer
    assert isinstance(mixer, GluConvSpec)
    for block in range(len(listener.layers) // PARTS):
        theirs = f"{tower}.conformer.{block}"
        first, attention, convolution, last = (f"listener.layers.{PARTS * block + part}" for part in range(PARTS))
        found |= named("listener.norms", theirs, {str(block): "norm"})
        found |= named(attention, f"{theirs}.attention", ATTENTION_3N)
        found |= single(attention, f"{theirs}.attention.attn", {"mixer.growth": "per_dim_scale"})
        found |= named(convolution, theirs, CONVOLUTION | CONVOLVED)
        taps = Source(name=f"{theirs}.lconv1d.depthwise_conv1d.weight", kernel=(mixer.length,))
        found[f"{convolution}.mixer.conv.weight"] = (taps,)
        found |= named(first, f"{theirs}.ffw_layer_start", FED | MAPS)
        found |= named(last, f"{theirs}.ffw_layer_end", FED | MAPS)
    return found


def gemma4_listener_weights(listener: ListenerSpec) -> WeightMap:
    """Return the weight map of the listener."""
    tower, stem = "model.audio_tower", "model.audio_tower.subsample_conv_projection"
    found = named("listener.stem", stem, {"out": "input_proj_linear"})
    found |= named("listener", tower, {"up": "output_proj"}, bias=True)
    found |= named("listener", "model.embed_audio", {"projector": "embedding_projection"})
    for n in range(2):
        found[f"listener.stem.convs.{n}.weight"] = (Source(name=f"{stem}.layer{n}.conv.weight", kernel=(TAPS, TAPS)),)
        found[f"listener.stem.convs.{n}.norm.weight"] = (Source(name=f"{stem}.layer{n}.norm.weight"),)
    for block in range(len(listener.layers) // PARTS):
        found |= _block_weights(listener, block, f"{tower}.layers.{block}")
    return found


def _block_weights(listener: ListenerSpec, block: int, theirs: str) -> WeightMap:
    first, attention, convolution, last = (f"listener.layers.{PARTS * block + part}" for part in range(PARTS))
    mixer = listener.layers[2].mixer
    assert isinstance(mixer, GluConvSpec)
    found = named("listener.norms", theirs, {str(block): "norm_out"})
    found |= named(attention, theirs, ATTENTION | {"mixer.distances": "self_attn.relative_k_proj"})
    found |= single(attention, theirs, {"mixer.growth": "self_attn.per_dim_scale"})
    found |= named(convolution, theirs, CONVOLUTION)
    taps = Source(name=f"{theirs}.lconv1d.depthwise_conv1d.weight", kernel=(mixer.length,))
    found[f"{convolution}.mixer.conv.weight"] = (taps,)
    found |= clipped_maps(attention, theirs, ATTENDED, listener.clipped)
    found |= clipped_maps(convolution, theirs, CONVOLVED, listener.clipped)
    for ours, name in ((first, "feed_forward1"), (last, "feed_forward2")):
        found |= named(ours, f"{theirs}.{name}", FED)
        found |= clipped_maps(ours, f"{theirs}.{name}", MAPS, listener.clipped)
    return found


def clipped_maps(ours: str, theirs: str, names: dict[str, str], clipped: bool) -> WeightMap:
    """Return the weight map of linear maps that may clip: our name → the names of theirs that it is made of."""
    inner = {name: " ".join(f"{part}.linear" for part in parts.split()) for name, parts in names.items()}
    return named(ours, theirs, inner) | (bounds(ours, theirs, names) if clipped else {})


def bounds(ours: str, theirs: str, names: dict[str, str]) -> WeightMap:
    """Return the weight map of the bounds of such maps."""
    return {
        f"{ours}.{module}.clips.bounds": tuple(
            Source(name=f"{theirs}.{name}.{side}_{end}", scalar=True)
            for name in parts.split()
            for side in ("input", "output")
            for end in ("min", "max")
        )
        for module, parts in names.items()
    }
