"""Mistral's `tekken.json` as a `tokenizers` object: a tiktoken vocabulary behind special tokens, and the regular
expression that cuts text."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, processors

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.arguments import short
from ridgeline.text.tiktoken_tokenizer import byte_level_backend
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.tiktoken_file import check_tokens

TEKKEN = "tekken.json"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MAX_TOKENS = 1 << 20  # eight times as many as published files have


def tekken_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return a backend with the ids of a folder's tekken.json. Prompts begin with `<s>`. Raise ModelLoadError for a
    file that is damaged, or older than its list of special tokens."""
    path = folder / TEKKEN
    content = read_json(path, required=True)
    try:
        config, listed = content["config"], content["special_tokens"]
        size, reserved, words = (
            config[name] for name in ("default_vocab_size", "default_num_special_tokens", "pattern")
        )
        special = [f"<SPECIAL_{i}>" for i in range(_count(reserved))]
        for entry in listed:
            special[_count(entry["rank"])] = str(entry["token_str"])
        tokens = [_bytes(entry, rank) for rank, entry in enumerate(content["vocab"][: _count(size - reserved)])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is no tokenizer with special tokens of its own ({type(error).__name__}: {str(error)[:80]}); take "
            "the model's tokenizer.json instead."
        ) from error
    check_tokens(tokens, path)
    if len(set(special)) < len(special) or NAMED["bos_token"] not in special:
        raise ModelLoadError(f"{path} has two special tokens with one text, or no <s>; copy it again from its source.")
    backend = byte_level_backend(tokens, _pattern(words, path), special)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    first = NAMED["bos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, special.index(first))]
    )
    return backend


def _pattern(words: object, path: Path) -> str:
    """Return the regular expression that cuts text. Raise ModelLoadError if it is none."""
    shown = "it is no text"
    if isinstance(words, str):
        try:
            Regex(words)
            return words
        except Exception as error:  # the library has no type of its own for what it cannot read
            shown = str(error).partition("\n")[0][:80]
    raise ModelLoadError(
        f"{path} cuts text with {short(words)}, which is no regular expression ({shown}); copy it again from its "
        "source."
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _bytes(entry: Mapping[str, Any], rank: int) -> bytes:
    if entry["rank"] != rank:
        raise ValueError(f"the token of rank {rank} has the rank {entry['rank']!r}")
    return binascii.a2b_base64(entry["token_bytes"], strict_mode=True)
