"""Tiny random Whisper models of transformers, saved as model folders with tokenizers, and sounds for them.

A window has 1 second, so that tests are fast.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

RATE, SECONDS, POSITIONS = 16_000, 1, 50
LANGUAGES = ("en", "de", "fr", "nl")
TIMES = 51  # from 0.00 to 1.00 in steps of 0.02
KINDS = {"multilingual": 80, "english": 80, "large": 128}  # the bands of each


def specials(kind: str) -> list[str]:
    """Return the special tokens in Whisper's order."""
    tasks = ["<|translate|>", "<|transcribe|>"]
    languages = [f"<|{each}|>" for each in (LANGUAGES if kind != "english" else ("en",))]
    last = ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    times = [f"<|{0.02 * n:.2f}|>" for n in range(TIMES)]
    return ["<|endoftext|>", "<|startoftranscript|>", *languages, *tasks, *last, *times]


def words() -> list[str]:
    """Return the alphabet of bytes and some words, as a tokenizer of bytes spells them."""
    found = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    return [*found, *(f"\u0120w{n}" for n in range(44))]


def ids(kind: str) -> dict[str, int]:
    return {token: len(words()) + n for n, token in enumerate(specials(kind))}


@cache
def build(kind: str) -> Any:
    """Return the oracle, in float32. Norms and biases are random too."""
    torch.manual_seed(len(kind))
    named = ids(kind)
    config = transformers.WhisperConfig(
        vocab_size=len(words()) + len(named),
        num_mel_bins=KINDS[kind],
        d_model=60,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=5,
        decoder_attention_heads=3,
        encoder_ffn_dim=72,
        decoder_ffn_dim=80,
        max_source_positions=POSITIONS,
        max_target_positions=64,
        init_std=0.15,
        decoder_start_token_id=named["<|startoftranscript|>"],
        eos_token_id=named["<|endoftext|>"],
        bos_token_id=named["<|endoftext|>"],
        pad_token_id=named["<|endoftext|>"],
        suppress_tokens=[],
        begin_suppress_tokens=[],
        attn_implementation="eager",
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path and path.endswith("weight"):
                parameter.add_(torch.rand_like(parameter) - 0.5)
            elif path.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) / 4)
    multilingual = kind != "english"
    generation: dict[str, Any] = {
        "no_timestamps_token_id": named["<|notimestamps|>"],
        "is_multilingual": multilingual,
        "suppress_tokens": [1, 2, 7, named["<|startofprev|>"], named["<|nospeech|>"], named["<|startoftranscript|>"]],
        "begin_suppress_tokens": [220, named["<|endoftext|>"]],
        "max_initial_timestamp_index": 25,
        "prev_sot_token_id": named["<|startofprev|>"],
        "max_length": 64,
        "alignment_heads": [[1, 0], [2, 1], [2, 2]],
    }
    if multilingual:
        generation |= {
            "lang_to_id": {f"<|{each}|>": named[f"<|{each}|>"] for each in LANGUAGES},
            "task_to_id": {each: named[f"<|{each}|>"] for each in ("transcribe", "translate")},
        }
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def extractor(kind: str) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=KINDS[kind], chunk_length=SECONDS)


def save(kind: str, folder: Path) -> Path:
    """Save `build(kind)` with its tokenizer, as the hub would hold it."""
    build(kind).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words())}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials(kind))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    extractor(kind).save_pretrained(folder)
    return folder


def sounds(count: int = 4, seconds: float = SECONDS) -> list[np.ndarray]:
    """Return tones that rise under noise, each of another length up to `seconds`."""
    generator = np.random.default_rng(count)
    found = []
    for n in range(count):
        length = int(RATE * seconds * (1 - n / (2 * count)))
        time = np.arange(length) / RATE
        tone = np.sin(2 * np.pi * (200 + 150 * n + 300 * time) * time) * (0.3 + 0.2 * n)
        found.append((tone + 0.05 * generator.standard_normal(length)).astype(np.float32))
    return found


@torch.inference_mode()
def logprobs(model: Any, kind: str, samples: np.ndarray, decoded: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the token behind each of `decoded`: float32 [tokens, V]."""
    features = extractor(kind)(samples, sampling_rate=RATE, return_tensors="pt").input_features
    given = features.to(next(model.parameters()).dtype)
    return model(input_features=given, decoder_input_ids=torch.tensor([decoded])).logits[0].float().log_softmax(-1)
