"""Tiny random encoder-decoder models of transformers, saved as model folders with tokenizers.

Odd widths of heads, vocabularies and layers show what is mixed up.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

VOCAB, POSITIONS = 307, 96
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 44,
    "d_kv": 20,
    "d_ff": 72,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "n_positions": POSITIONS,
    "decoder_start_token_id": 0,
    "initializer_factor": 1.0,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 60,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": POSITIONS,
    "init_std": 0.2,
    "forced_eos_token_id": None,
}
_MARIAN = {
    "scale_embedding": True,
    "activation_function": "swish",
    "pad_token_id": 3,
    "eos_token_id": 1,
    "decoder_start_token_id": 3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5_v1_1": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", _BART),
    "bart_forced": ("Bart", {**_BART, "scale_embedding": True}),
    "mbart": ("MBart", {**_BART, "scale_embedding": True, "decoder_start_token_id": 2}),
    "pegasus": ("Pegasus", {**_BART, "scale_embedding": True, "activation_function": "relu"}),
    "marian": ("Marian", {**_BART, **_MARIAN}),
    "m2m100": ("M2M100", _BART),
}

# What their generation_config.json says besides. M2M-100 counts no padding among its positions, so none may come.
GENERATION: dict[str, dict[str, Any]] = {
    "bart_forced": {"forced_bos_token_id": 0, "forced_eos_token_id": 2},
    "marian": {"bad_words_ids": [[3], [20], [40, 41]], "forced_eos_token_id": 1},
    "m2m100": {"forced_bos_token_id": 9, "bad_words_ids": [[1]]},
}


@cache
def build(family: str) -> Any:
    """Return the oracle, in float32. Norms and biases are random too."""
    name, entries = FAMILIES[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{name}Config")(**entries)
    config._attn_implementation = "eager"  # with torch's own kernel UMT5's decoder sees what comes later (5.17)
    kind = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path and path.endswith("weight"):
                parameter.add_(torch.rand_like(parameter) - 0.5)
            elif path.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) / 4)
    if family == "t5_v1_1":  # whose output layer is a table of its own, as in published models
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 44) / 4)
    if family == "marian":
        model.final_logits_bias = torch.randn_like(model.final_logits_bias) / 2
    model.generation_config.update(**GENERATION.get(family, {}))
    return model


def save(family: str, folder: Path) -> Path:
    """Save `build(family)` with a tokenizer of words w4, w5, …, as the hub would hold it."""
    model = build(family)
    model.save_pretrained(folder)
    if family == "t5_v1_1":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    eos = model.config.eos_token_id
    words = {0: "<pad>", 1: "</s>", 2: "<e>", 3: "<unk>"}
    vocabulary = {words.get(number, f"w{number}"): number for number in range(VOCAB)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    end = words[eos]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, eos)])
    backend.add_special_tokens(list(words.values()))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def start(family: str) -> list[int]:
    """Return the tokens that outputs follow."""
    config, forced = build(family).config, build(family).generation_config.forced_bos_token_id
    return [config.decoder_start_token_id, *([] if forced is None else [forced])]


@torch.inference_mode()
def logprobs(model: Any, encoded: list[int], decoded: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the token behind each of `decoded`: float32 [tokens, V]."""
    return (
        model(input_ids=torch.tensor([encoded]), decoder_input_ids=torch.tensor([decoded]))
        .logits[0]
        .float()
        .log_softmax(-1)
    )
