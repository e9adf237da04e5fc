"""Translation of GGUF's names to ours: its values become a config, its tensors weights.

llama.cpp's conversion (convert_hf_to_gguf.py) decides what a file holds. It adds Gemma's 1 to norms, and reorders the
queries and keys of the Llama family so that pairs that rotate together are neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models import model_config
from ridgeline.models.config import ModelConfig
from ridgeline.weights.formats.gguf_file import GGUF, read_gguf

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_NORMS_BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_NORMS_BOTH = {**_NORMS_AFTER, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
_EXPERTS = {  # each holds one matrix of all experts
    **dict.fromkeys(("mlp.experts.gate_proj", "block_sparse_moe.experts.w1"), "ffn_gate_exps"),
    **dict.fromkeys(("mlp.experts.up_proj", "block_sparse_moe.experts.w3"), "ffn_up_exps"),
    **dict.fromkeys(("mlp.experts.down_proj", "block_sparse_moe.experts.w2"), "ffn_down_exps"),
}
_ROUTERS = dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), "ffn_gate_inp")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Dialect:
    """The form of one of llama.cpp's architectures.

    `name` is the architecture's name in config.json, and `experts` its name if layers have experts. `norms` are those
    of a layer, by our checkpoints' names. With `interleaved` queries and keys are reordered. `config` returns the
    entries beyond those of all architectures.
    """

    name: str
    norms: Mapping[str, str]
    experts: str | None = None
    interleaved: bool = False
    config: Callable[[Values], dict[str, Any]] = lambda values: {}


class Values:
    """The architecture's own values in a file: `values["block_count"]` is "llama.block_count"."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.architecture = gguf, gguf.values.get("general.architecture")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. One that is given per layer counts only if all layers have the same."""
        value = self.gguf.values.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(f"{self.gguf.path} has no {self.architecture}.{name}; the model needs it.")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a number that we calculate with, at least 1. Raise ModelLoadError."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(
                f"{self.gguf.path} sets {self.architecture}.{name} to {repr(value)[:80]}; it must be a whole number of "
                "at least 1, so download the file again."
            )
        return value

    @property
    def head_dim(self) -> int:
        return self.whole("attention.key_length", max(1, self.shared_width))

    @property
    def shared_width(self) -> int:
        return self.whole("embedding_length") // self.whole("attention.head_count")


def gguf_model_config(path: Path) -> ModelConfig:
    """Return a GGUF file as a `ModelConfig`. Raise ModelLoadError."""
    try:
        return model_config(gguf_config(read_gguf(path)))
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path} describes no model that we can build: read as a folder's, {error}") from error


def gguf_config(gguf: GGUF) -> dict[str, Any]:
    """Return a config.json that says the same. Raise ModelLoadError for an architecture that we do not know in this
    form."""
    values = Values(gguf)
    dialect = _dialect(values)
    experts = _experts(values, dialect)
    name = dialect.experts if experts and dialect.experts else dialect.name
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{gguf.path} has no token_embd.weight; it holds no language model.")
    if dialect.interleaved and values.head_dim % 2:
        raise ModelLoadError(
            f"{gguf.path} has heads of {values.head_dim} dimensions, which must rotate in pairs; download it again."
        )
    common = {
        "architectures": [name],
        "model_type": _MODEL_TYPES.get(name, values.architecture),
        "vocab_size": embedding.shape[0],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": values.whole("attention.head_count"),
        "num_key_value_heads": values.get("attention.head_count_kv", values["attention.head_count"]),
        "head_dim": values.head_dim,
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": values["context_length"],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": _dtype(gguf),
        **_special_ids(gguf),
    }
    return {**common, **experts, **_rope(values), **dialect.config(values)}


def gguf_weights(gguf: GGUF, weights: WeightMap, spec: ModelSpec) -> WeightMap:
    """Return a checkpoint's `weights` as the file has them."""
    dialect = _dialect(Values(gguf))
    parts = {**_PARTS, **_ROUTERS, **_EXPERTS, **dialect.norms}

    def renamed(source: Source, heads: int | None) -> Source:
        name, _, kind = source.name.rpartition(".")
        if name in _TOP:
            return replace(source, name=f"{_TOP[name]}.{kind}", complete=True)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert layer is not None, f"no dialect's architecture has {name}"
        part = re.sub(r"\.experts\.\d+\.", ".experts.", layer[2])
        stored = f"blk.{layer[1]}.{parts[part]}.{kind}"
        return replace(source, name=stored, complete=True, interleaved=heads, stacked=part in _EXPERTS)

    def heads_of(source: Source) -> int | None:
        mixer = spec.layers[0].attention
        if not dialect.interleaved:
            return None
        return {"q_proj": mixer.num_heads, "k_proj": mixer.num_kv_heads}.get(source.name.split(".")[-2])

    return {  # each stack once, though all of its experts are renamed to it
        parameter: tuple(dict.fromkeys(renamed(source, heads_of(source)) for source in sources))
        for parameter, sources in weights.items()
    }


def _dialect(values: Values) -> Dialect:
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
        "moe_intermediate_size": values.get("expert_feed_forward_length", values["feed_forward_length"]),
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
    found: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", 10000.0)}
    width = values.whole("rope.dimension_count", values.head_dim)
    if width != values.head_dim:
        found["partial_rotary_factor"] = width / values.head_dim
    each, short, long = (values.gguf.floats(name) for name in ROPE_FACTORS)
    original = values.get("rope.scaling.original_context_length", values["context_length"])
    scaling: dict[str, Any] = {"rope_type": values.get("rope.scaling.type", "none")}
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
        scaling |= {"factor": values["rope.scaling.factor"], "original_max_position_embeddings": original}
    return found if scaling["rope_type"] == "none" else {**found, "rope_scaling": scaling}


def _biases(values: Values) -> dict[str, Any]:
    tensors = values.gguf.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors}


def _phi3(values: Values) -> dict[str, Any]:
    return {
        "sliding_window": values.get("attention.sliding_window") or None,
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values["context_length"]
        ),
        "pad_token_id": None,
    }


def _granite(values: Values) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**_biases(values), **{ours: values[theirs] for ours, theirs in names.items()}}


def _gemma2(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=46),
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }


def _gemma3(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=62),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def _gemma(values: Values, largest: int) -> dict[str, Any]:
    """Return Gemma's entries.

    The largest model of a generation, which is known by its number of layers, scales scores by the model's width
    divided by its heads, and not by the width of a head. The file does not say so, and llama.cpp decides in the same
    way.
    """
    is_largest = values["block_count"] == largest
    width = values.shared_width if is_largest else values.head_dim
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.get("attention.sliding_window"),
        "query_pre_attn_scalar": width,
    }
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in pattern]
    return config


_MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

DIALECTS = {
    "llama": Dialect("LlamaForCausalLM", _NORMS_BEFORE, experts="MixtralForCausalLM", interleaved=True, config=_biases),
    "qwen2": Dialect("Qwen2ForCausalLM", _NORMS_BEFORE),
    "qwen3": Dialect("Qwen3ForCausalLM", _NORMS_BEFORE),
    "qwen3moe": Dialect(
        "Qwen3MoeForCausalLM",
        _NORMS_BEFORE,
        experts="Qwen3MoeForCausalLM",
        config=lambda values: {"norm_topk_prob": True},  # which llama.cpp does, and the file does not say
    ),
    "olmoe": Dialect("OlmoeForCausalLM", _NORMS_BEFORE, experts="OlmoeForCausalLM"),
    "gemma2": Dialect("Gemma2ForCausalLM", _NORMS_BOTH, config=_gemma2),
    "gemma3": Dialect("Gemma3ForCausalLM", _NORMS_BOTH, config=_gemma3),
    "phi3": Dialect(
        "Phi3ForCausalLM",
        _NORMS_BEFORE,
        config=_phi3,
    ),
    "olmo2": Dialect("Olmo2ForCausalLM", _NORMS_AFTER),
    "granite": Dialect("GraniteForCausalLM", _NORMS_BEFORE, interleaved=True, config=_granite),
}
