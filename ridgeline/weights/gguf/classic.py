"""Dense models in GGUF whose norms are LayerNorm: GPT-2 and what came after it, Cohere's, OLMo."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dialect import NORMS_BEFORE, Dialect, Names
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.gguf.windows import windows

_TOP = {
    **dict.fromkeys(("transformer.wte", "transformer.word_embeddings", "gpt_neox.embed_in"), "token_embd"),
    **dict.fromkeys(("transformer.ln_f", "transformer.norm_f", "gpt_neox.final_layer_norm"), "output_norm"),
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.wpe": "position_embd",
    "embed_out": "output",
}
_BLOCKS: Names = {  # of models that keep queries, keys and values in one matrix
    **dict.fromkeys(
        ("attn.c_attn", "attn.Wqkv", "attention.query_key_value", "self_attention.query_key_value"), "attn_qkv"
    ),
    **dict.fromkeys(("attn.c_proj", "attn.out_proj", "attention.dense", "self_attention.dense"), "attn_output"),
    **dict.fromkeys(("ln_1", "norm_1"), "attn_norm"),
    **dict.fromkeys(("ln_2", "norm_2"), "ffn_norm"),
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
}
_HEAD_BY_HEAD = ("attention.query_key_value", "self_attention.query_key_value")


def _blocks(name: str, layer_norm: str, config: Any) -> Dialect:
    """Return the form of a model that keeps queries, keys and values in one matrix."""
    return Dialect(
        name,
        NORMS_BEFORE,
        config=config,
        parts=_BLOCKS,
        top=_TOP,
        layer_norm=layer_norm,
        unpacked=_HEAD_BY_HEAD,
    )


def _gpt2(values: Values) -> dict[str, Any]:
    return {
        "n_embd": values["embedding_length"],
        "n_head": values["attention.head_count"],
        "n_layer": values.layers,
        "n_inner": values["feed_forward_length"],
        "n_positions": values["context_length"],
    }


def _neox(values: Values) -> dict[str, Any]:
    return {
        "attention_bias": values.has("attn_qkv.bias"),
        "use_parallel_residual": values.get("use_parallel_residual", True),
        "rotary_pct": values.whole("rope.dimension_count", values.head_dim) / values.head_dim,
        "rotary_emb_base": values.get("rope.freq_base", 10000.0),
    }


def _bloom(values: Values) -> dict[str, Any]:
    _one_head_of_keys_each(values)
    values.refuse_unless("feed_forward_length", 4 * values.whole("embedding_length"))
    return {"n_head": values["attention.head_count"], "seq_length": values["context_length"]}


def _mpt(values: Values) -> dict[str, Any]:
    _one_head_of_keys_each(values)
    values.refuse_unless("feed_forward_length", 4 * values.whole("embedding_length"))
    values.get("attention.clamp_kqv")
    return {
        "d_model": values["embedding_length"],
        "n_heads": values["attention.head_count"],
        "n_layers": values.layers,
        "max_seq_len": values["context_length"],
        "no_bias": not values.has("attn_qkv.bias"),
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": values.get("attention.max_alibi_bias"),
            "clip_qkv": values.get("attention.clamp_kqv") or None,
        },
    }


def _one_head_of_keys_each(values: Values) -> None:
    values.refuse_unless("attention.head_count_kv", values.whole("attention.head_count"))


def _falcon(values: Values) -> dict[str, Any]:
    return {
        "new_decoder_architecture": True,  # with one head of keys and one norm it is the first one
        "num_kv_heads": values.get("attention.head_count_kv", 1),
        "num_ln_in_parallel_attn": 2 if values.has("attn_norm_2.weight") else 1,
        "ffn_hidden_size": values["feed_forward_length"],
        "bias": values.has("attn_qkv.bias"),
    }


def _starcoder2(values: Values) -> dict[str, Any]:
    return {"use_bias": values.has("attn_q.bias"), "sliding_window": None, "tie_word_embeddings": True}


def _stablelm(values: Values) -> dict[str, Any]:
    return {"use_qkv_bias": values.has("attn_q.bias"), "use_parallel_residual": not values.has("ffn_norm.weight")}


def _phi2(values: Values) -> dict[str, Any]:
    """Return Phi's entries. The width of its feed-forward is that of the tensor: files say four times the model's."""
    up = values.gguf.tensors.get("blk.0.ffn_up.weight")
    return {} if up is None else {"intermediate_size": up.shape[0]}


def _cohere(values: Values) -> dict[str, Any]:
    return {"logit_scale": values.get("logit_scale") or 1.0, "attention_bias": values.has("attn_q.bias")}


def _cohere2(values: Values) -> dict[str, Any]:
    return {**_cohere(values), **windows(values, every=4)}


def _olmo(values: Values) -> dict[str, Any]:
    """Return OLMo's entries. Its clip is read, since llama.cpp's other models have none."""
    return {"clip_qkv": values.get("attention.clamp_kqv") or None}


CLASSIC = {
    "gpt2": _blocks("GPT2LMHeadModel", "layer_norm_epsilon", _gpt2),
    "gptneox": _blocks("GPTNeoXForCausalLM", "layer_norm_eps", _neox),
    "bloom": _blocks("BloomForCausalLM", "layer_norm_epsilon", _bloom),
    "mpt": _blocks("MptForCausalLM", "layer_norm_epsilon", _mpt),
    "falcon": _blocks("FalconForCausalLM", "layer_norm_epsilon", _falcon),
    "starcoder2": Dialect("Starcoder2ForCausalLM", NORMS_BEFORE, config=_starcoder2, layer_norm="norm_epsilon"),
    "stablelm": Dialect("StableLmForCausalLM", NORMS_BEFORE, config=_stablelm, layer_norm="layer_norm_eps"),
    "phi2": Dialect("PhiForCausalLM", NORMS_BEFORE, config=_phi2, layer_norm="layer_norm_eps"),
    "command-r": Dialect("CohereForCausalLM", NORMS_BEFORE, config=_cohere, layer_norm="layer_norm_eps"),
    "cohere2": Dialect("Cohere2ForCausalLM", NORMS_BEFORE, config=_cohere2, layer_norm="layer_norm_eps"),
    "olmo": Dialect("OlmoForCausalLM", {}, interleaved=True, config=_olmo, layer_norm="layer_norm_eps"),
}
