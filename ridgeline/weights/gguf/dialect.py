"""The form of one of llama.cpp's architectures, and the names that its tensors have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.weights.gguf.values import Values

Names = Mapping[str, str | tuple[str, ...]]  # a layer's module in checkpoints → its tensors in GGUF

NORMS_BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
NORMS_BOTH = {**NORMS_AFTER, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"}
# Norms before both parts, of which llama.cpp names the second by what it comes after
NORMS_BEHIND = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
# Those of GLM 4, whose names in checkpoints say what they come after
NORMS_AROUND = {
    **NORMS_BEFORE,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}

_ATTENTION: Names = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.dense": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
_MLP: Names = {
    **{f"{of}.gate_proj": "ffn_gate" for of in ("mlp", "feed_forward")},
    **{f"{of}.up_proj": "ffn_up" for of in ("mlp", "feed_forward")},
    **{f"{of}.down_proj": "ffn_down" for of in ("mlp", "feed_forward")},
    "mlp.gate_up_proj": "ffn_up",
    **dict.fromkeys(("mlp.c_fc", "mlp.fc1", "mlp.dense_h_to_4h", "ffn.up_proj"), "ffn_up"),
    **dict.fromkeys(("mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h", "ffn.down_proj"), "ffn_down"),
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
STACKS: Names = {  # each holds one matrix of all experts
    **dict.fromkeys(("mlp.experts.gate_proj", "feed_forward.experts.gate_proj"), "ffn_gate_exps"),
    **dict.fromkeys(("mlp.experts.up_proj", "feed_forward.experts.up_proj"), "ffn_up_exps"),
    **dict.fromkeys(("mlp.experts.down_proj", "feed_forward.experts.down_proj"), "ffn_down_exps"),
    **dict.fromkeys(("block_sparse_moe.experts.w1", "feed_forward.experts.w1"), "ffn_gate_exps"),
    **dict.fromkeys(("block_sparse_moe.experts.w3", "feed_forward.experts.w3"), "ffn_up_exps"),
    **dict.fromkeys(("block_sparse_moe.experts.w2", "feed_forward.experts.w2"), "ffn_down_exps"),
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    **{f"moe.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_EXPERTS: Names = {
    **dict.fromkeys(
        ("mlp.gate", "mlp.gate.wg", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router.layer"),
        "ffn_gate_inp",
    ),
    **dict.fromkeys(("feed_forward.gate", "feed_forward.router", "moe.gate"), "ffn_gate_inp"),
    **{
        f"{of}.{part}_proj": f"ffn_{part}_shexp"
        for of in (
            *(f"mlp.{name}" for name in _SHARED),
            "feed_forward.shared_expert",
            "share_expert",
            "block_sparse_moe.shared_experts",
        )
        for part in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_RECURRENT: Names = {
    **{f"{of}.in_proj": "ssm_in" for of in ("mamba", "mixer")},
    **{f"{of}.out_proj": "ssm_out" for of in ("mamba", "mixer", "linear_attn")},
    **{f"{of}.conv1d": "ssm_conv1d" for of in ("mamba", "mixer", "linear_attn")},
    **{f"{of}.norm": "ssm_norm" for of in ("mamba", "mixer", "linear_attn")},
    **{f"{of}.x_proj": "ssm_x" for of in ("mamba", "mixer")},
    **{f"{of}.dt_proj": "ssm_dt" for of in ("mamba", "mixer")},
    **{f"mamba.{each}_layernorm": f"ssm_{each}_norm" for each in ("dt", "b", "c")},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
WHOLE: Names = {  # tensors that are no module's weight or bias
    **dict.fromkeys(("self_attn.sinks", "self_attn.attention_sink_bias"), "attn_sinks.weight"),
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "feed_forward.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    **dict.fromkeys(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"), "exp_probs_b.bias"),
    **dict.fromkeys(("block_sparse_moe.e_score_correction_bias", "feed_forward.expert_bias"), "exp_probs_b.bias"),
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.act_fn.alpha_{each}": f"xielu.alpha_{each}" for each in "pn"},
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "moe.router_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    **{f"{of}.D": "ssm_d" for of in ("mamba", "mixer")},
    **{f"{of}.A_log": "ssm_a" for of in ("mamba", "mixer", "linear_attn")},
    **{f"{of}.dt_bias": "ssm_dt.bias" for of in ("mamba", "mixer", "linear_attn")},
}
FUSED: Names = {  # where files hold gates above ups in one stack
    **dict.fromkeys(("mlp.experts.gate_proj", "mlp.experts.up_proj"), "ffn_gate_up_exps"),
}
PARTS: Names = {**_ATTENTION, **_MLP, **STACKS, **_EXPERTS, **_RECURRENT}
TOP = {
    **dict.fromkeys(("model.embed_tokens", "backbone.embeddings"), "token_embd"),
    **dict.fromkeys(("model.norm", "model.final_layernorm", "backbone.norm_f"), "output_norm"),
    "lm_head": "output",
}


@dataclass(frozen=True)
class Dialect:
    """The form of one of llama.cpp's architectures.

    name: the architecture's name in config.json. experts: its name if layers have experts.
    norms: those of a layer, by our checkpoints' names.
    interleaved: queries and keys are reordered, so that pairs that rotate together are neighbours.
    config: returns the entries beyond those of all architectures, or in their place.
    parts, top: names that differ from those of other architectures.
    dense_parts: names that differ if no layer has experts.
    unpacked: modules whose rows come projection by projection, though checkpoints have them head by head.
    attends: it has heads; False: nothing but other mixers.
    layer_norm: the entry with the epsilon of its norms, if these are LayerNorm.
    """

    name: str
    norms: Names
    experts: str | None = None
    interleaved: bool = False
    config: Callable[[Values], dict[str, Any]] = lambda values: {}
    parts: Names = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    attends: bool = True
    layer_norm: str = ""
    dense_parts: Names = field(default_factory=dict)
    unpacked: tuple[str, ...] = ()


def yarn(values: Values) -> dict[str, Any]:
    """Return the entries of a rotation that YaRN lengthened."""
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": values["rope.scaling.factor"],
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values["context_length"]
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        if (number := values.get(f"rope.scaling.yarn_{name}")) is not None:
            found[name] = number
    return found


def scaled_yarn(values: Values) -> dict[str, Any]:
    """Return YaRN's entries, with the factor of scores that DeepSeek's models have."""
    if not (multiplier := values.number("rope.scaling.yarn_log_multiplier", 0.0)):
        return yarn(values)
    scale = round(10 * multiplier, 6)  # llama.cpp's has a tenth in it
    return {**yarn(values), "mscale": scale, "mscale_all_dim": scale}
