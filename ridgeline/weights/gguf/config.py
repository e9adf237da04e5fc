"""A GGUF file's values as the entries of a config.json.

llama.cpp's conversion decides what a file holds. It adds Gemma's 1 to norms, and reorders the queries and keys of the
Llama family so that pairs that rotate together are neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.models.config import ModelConfig
from ridgeline.weights.formats.gguf_file import GGUF, read_gguf
from ridgeline.weights.gguf.classic import CLASSIC
from ridgeline.weights.gguf.dense import DENSE
from ridgeline.weights.gguf.dialect import Dialect, yarn
from ridgeline.weights.gguf.encoders import ENCODERS
from ridgeline.weights.gguf.gemma import GEMMA, lent_keys
from ridgeline.weights.gguf.mixtures import MIXTURES
from ridgeline.weights.gguf.recurrent import RECURRENT
from ridgeline.weights.gguf.values import Values

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
DIALECTS = {**DENSE, **CLASSIC, **GEMMA, **MIXTURES, **RECURRENT, **ENCODERS}

_USUAL = {  # what values must be that an architecture does not read
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
_MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def gguf_model_config(path: Path) -> ModelConfig:
    """Return a GGUF file as a `ModelConfig`. Raise ModelLoadError."""
    gguf = read_gguf(path)
    try:
        found = model_config(gguf_config(gguf))
    except ModelLoadError as error:
        if str(path) in str(error) or str(gguf.path) in str(error):
            raise
        raise ModelLoadError(f"{path} describes no model that we can build: read as a folder's, {error}") from error
    values = Values(gguf)
    drafting = [f"blk.{layer}." for layer in range(values.layers, values.blocks)]
    return replace(found, spec=replace(found.spec, unused=(*drafting, *lent_keys(values))))


def gguf_config(gguf: GGUF) -> dict[str, Any]:
    """Return a config.json that says the same. Raise ModelLoadError for an architecture that we do not know in this
    form."""
    values = Values(gguf)
    dialect = dialect_of(values)
    experts = _experts(values, dialect)
    name = dialect.experts if experts and dialect.experts else dialect.name
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{gguf.path} has no token_embd.weight; it holds no language model.")
    common = {
        "architectures": [name],
        "model_type": _MODEL_TYPES.get(name, values.architecture),
        "vocab_size": embedding.shape[0],
        "hidden_size": values["embedding_length"],
        "num_hidden_layers": values.layers,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": _dtype(gguf),
        **_special_ids(gguf),
    }
    heads = _heads(values, dialect) if dialect.attends else {}
    found = {**common, **heads, **experts, **dialect.config(values)}
    _refuse_unread(values)
    return found


def _refuse_unread(values: Values) -> None:
    """Raise ModelLoadError for a value that changes the result, and that nothing asked for."""
    for name, usual in _USUAL.items():
        if name not in values.asked:
            values.refuse_unless(name, *usual)
    values.refuse_unless("attention.causal", values.architecture not in ENCODERS)
    if "attention.scale" not in values.asked and values.get("attention.scale"):  # llama.cpp takes 0 as absent
        values.refuse_unless("attention.scale", values.head_dim**-0.5)


def _heads(values: Values, dialect: Dialect) -> dict[str, Any]:
    if dialect.interleaved and values.head_dim % 2:
        raise ModelLoadError(
            f"{values.gguf.path} has heads of {values.head_dim} dimensions, which must rotate in pairs; download it "
            "again."
        )
    found = {
        "intermediate_size": values.get("feed_forward_length", values.get("expert_feed_forward_length")),
        "num_attention_heads": values.most("attention.head_count"),
        "num_key_value_heads": values.get("attention.head_count_kv", values["attention.head_count"]),
        "head_dim": values.head_dim,
        "max_position_embeddings": values["context_length"],
        **_epsilon(values, dialect),
    }
    return {**found, **_rope(values)}


def _epsilon(values: Values, dialect: Dialect) -> dict[str, Any]:
    if not dialect.layer_norm:
        return {"rms_norm_eps": values["attention.layer_norm_rms_epsilon"]}
    other = values.get("attention.layer_norm_rms_epsilon")  # some of Nemotron-H's have this, some the usual
    return {dialect.layer_norm: values["attention.layer_norm_epsilon"] if other is None else other}


def dialect_of(values: Values) -> Dialect:
    if not isinstance(values.architecture, str) or values.architecture not in DIALECTS:
        known = ", ".join(sorted(DIALECTS))
        raise ModelLoadError(
            f"{values.gguf.path} holds the architecture {values.architecture!r}; as GGUF we read {known}."
        )
    return DIALECTS[values.architecture]


def _experts(values: Values, dialect: Dialect) -> dict[str, Any]:
    """Return the entries of a mixture of experts, or none for a dense model."""
    if not (count := values.get("expert_count")):
        return {}
    if dialect.experts is None:
        raise ModelLoadError(
            f"{values.gguf.path} has {count} experts in a layer, with which we do not read {values.architecture}."
        )
    return {
        "num_experts": count,
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values.get("expert_feed_forward_length") or values["feed_forward_length"],
        "expert_weights_scale": values.get("expert_weights_scale") or 1.0,  # llama.cpp takes 0 as absent too
    }


def _dtype(gguf: GGUF) -> str:
    """Return the dtype of the layers' matrices. Quantized ones become bfloat16, whose rounding is far finer than
    theirs."""
    kinds = {info.type.name for name, info in gguf.tensors.items() if name.startswith("blk.") and len(info.shape) > 1}
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return plain.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _special_ids(gguf: GGUF) -> dict[str, Any]:
    """Return the special token ids. Chat models may end a turn (eot) otherwise than a text (eos)."""
    ends = [gguf.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = {"eos_token_id": [i for i in ends if i is not None]}
    bos = gguf.values.get("tokenizer.ggml.bos_token_id")
    return ids if bos is None else {**ids, "bos_token_id": bos}


def _rope(values: Values) -> dict[str, Any]:
    """Return the rotary entries. Llama 3.1 and Phi-3 bring a factor per rotated pair, which is LongRoPE's form."""
    found: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", 10000.0), "rope_scaling": None}
    width = values.whole("rope.dimension_count", values.head_dim)
    if width != values.head_dim:
        found["partial_rotary_factor"] = width / values.head_dim
    each, short, long = (values.gguf.floats(name) for name in ROPE_FACTORS)
    original = values.get("rope.scaling.original_context_length", values["context_length"])
    stretched = values.get("rope.scaling.factor") not in (None, 0, 1)
    scaling: dict[str, Any] = {"rope_type": values.get("rope.scaling.type", "linear" if stretched else "none")}
    if each is not None or (short is not None and long is not None):
        scaling = {
            "rope_type": "longrope",
            "short_factor": each or short,
            "long_factor": each or long,
            "attention_factor": values.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    elif scaling["rope_type"] == "linear":
        scaling["factor"] = values["rope.scaling.factor"]
    elif scaling["rope_type"] == "yarn":
        scaling = yarn(values)
    return found if scaling["rope_type"] == "none" else {**found, "rope_scaling": scaling}
