"""Tiny models of transformers' classes, with random weights, for the way in through its modules."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.weights.loader import load_weights, read_model_config

WIDTH, HEADS, VOCAB, WINDOW, CONTEXT = 80, 4, 307, 8, 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


class Kind(NamedTuple):
    """A class of transformers, its config's class, and the sizes that the tests give it."""

    model: str
    config: str
    values: dict[str, Any]

    def built(self) -> Any:
        """Return the model in float32 with random weights, the same on every call."""
        config = getattr(transformers, self.config)(**self.values)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
        generator = torch.Generator().manual_seed(sum(self.model.encode()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = parameter.ndim == 1 and name.endswith("weight")
                parameter.normal_(float(norm), 0.2, generator=generator)
        return model.eval()


def kind(name: str, config: str = "", **changes: Any) -> Kind:
    """Return a class with the common sizes and these in their place; None leaves a size out."""
    return Kind(name, config or name.removesuffix("ForCausalLM") + "Config", {**COMMON, **changes})


HELIUM = kind("HeliumForCausalLM", head_dim=20)
CWM = kind("CwmForCausalLM", head_dim=20, sliding_window=WINDOW)  # a layer of four sees everything
LLAMA = kind("LlamaForCausalLM")


@cache
def oracle(of: str) -> Any:
    return {each.model: each for each in (HELIUM, CWM, LLAMA)}[of].built()


def saved(model: Any, folder: Path) -> Path:
    """Save a model, and return its folder."""
    model.save_pretrained(folder)
    return folder


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> ForeignDecoder:
    config = read_model_config(folder, impl="transformers")
    decoder = ForeignDecoder(
        config.foreign, config.spec, Ops(Platform(device_type="cpu")), dtype=dtype, device=torch.device("cpu")
    )
    load_weights(decoder, folder, config.weights)
    return decoder


# Sizes that a config gets if its class has an entry of the name
SIZES: dict[str, Any] = {
    **{**COMMON, "pad_token_id": 0, "head_dim": 20, "d_model": WIDTH, "n_embd": WIDTH, "ffn_dim": 112, "n_layer": 4},
    **{"n_head": HEADS, "n_positions": CONTEXT, "sliding_window": WINDOW, "global_head_dim": 20, "layer_types": None},
    **{"moe_intermediate_size": 40, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
    **{"v_head_dim": 20, "qk_head_dim": 40, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
}
LATENT = {
    "num_key_value_heads": HEADS,
    "head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}  # of keys and values that are made of latents
DECODER = {"is_decoder": True}

# Kinds of models of transformers' CONFIG_MAPPING that run through its modules → changes of their sizes
RUNNING: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in ("afmoe", "apertus", "arcee", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "ctrl")
    },
    **dict.fromkeys(("bert", "bert-generation", "electra", "ernie", "roc_bert"), DECODER),
    **{name: {} for name in ("cwm", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "fuyu", "gemma")},
    **{name: {} for name in ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe")},
    **{name: {} for name in ("gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe")},
    **{name: {} for name in ("granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{name: {} for name in ("hy_v3", "hyperclovax", "jais2", "laguna", "llama", "mellum", "mimo_v2_flash")},
    **{name: {} for name in ("minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral")},
    **{name: {} for name in ("modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt")},
    **{name: {} for name in ("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")},
    **{name: {} for name in ("seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma")},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "stablelm": {"partial_rotary_factor": 0.4},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1"), LATENT),
}


TWICE = "more than once for a token"
CHOSEN = "indices, an argument of its attention that we do not know"
VALUES = "its forward asks for values"
LENGTH = "does not say how long a context may be"
OWN = "it has an attention of its own"
MASK = "neither causal nor a window"
CROSS = "cross-attention"
STATES = "of the kind '[a-z_]+', which are recurrent"
OTHERWISE = "otherwise than by itself"

# Those that do not → changes of their sizes, and words of the reason
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({}, VALUES) for name in ("aria_text", "jetmoe", "inkling_text", "xlm")},
    **{name: ({}, CHOSEN) for name in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")},
    **{name: ({}, MASK) for name in ("big_bird", "megatron-bert", "rembert", "roformer")},
    **{name: ({}, OWN) for name in ("gpt_neox_japanese", "openai-gpt", "xglm", "trocr", "falcon", "gptj", "git")},
    **{
        name: ({}, CROSS)
        for name in ("bart", "blenderbot", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet")
    },
    **{name: ({}, TWICE) for name in ("diffllama", "hrm_text")},
    **{name: ({}, LENGTH) for name in ("bloom", "cpmant", "mamba", "xlnet", "xlstm")},
    **{name: ({}, STATES) for name in ("kimi_linear", "minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_next")},
    "codegen": ({"rotary_dim": 8}, OWN),
    "doge": ({"num_experts": 64}, "a mask that it makes itself"),
    "llama4_text": ({}, "'chunked_attention', which are attention over chunks"),
    "deepseek_v4": ({}, "_attention', which are attention over chunks"),
}
# Those that only the check at start refuses: their positions do not begin with 0
LATE: dict[str, dict[str, Any]] = {
    **{name: {**DECODER, "pad_token_id": 1} for name in ("camembert", "roberta", "xlm-roberta", "data2vec-text")},
    "moshi": {},
}


def cut(model_type: str, **changes: Any) -> Kind:
    """Return the causal language model of a kind of transformers' configs, with sizes that are cut."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config = configuration_auto.CONFIG_MAPPING_NAMES[model_type]
    made = getattr(transformers, config)
    entries = made().to_dict().keys() | getattr(made, "attribute_map", {}).keys()
    values = {name: value for name, value in {**SIZES, **changes}.items() if name in entries}
    return Kind(names if isinstance(names, str) else names[0], config, values)
