"""A tokenizer for a model that has only a config.json.

Servers turn tokens into text, and the cost of that belongs to the measurement; a folder without a tokenizer cannot be
served. This one is made rather than trained: the bytes, then ever longer words of lower-case letters, until the model's
vocabulary is full. Like a real one it is byte-level BPE, and its tokens have about four letters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.text.tokenizer import FILES as TOKENIZER_FILES

LETTERS = "etaoinshrdlucmfwypvbgkqjxz"  # the frequent letters first
FILES = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 30}


def config_of(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raise InvalidConfig if it has none."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"{folder}/config.json cannot be read ({error}); --model names a model's folder."
        ) from error
    return found if isinstance(found, dict) else {}


def vocab_size(folder: Path) -> int:
    """Return the vocabulary's size, or 0 if config.json does not say."""
    config = config_of(folder)
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def complete(folder: Path, target: Path) -> Path:
    """Return `target`, filled with the folder's JSON files and a tokenizer. Raise InvalidConfig for a model of
    bytes."""
    size = vocab_size(folder)
    if size < 256:
        raise InvalidConfig(f"{folder}/config.json has a vocab_size of {size}, too few for a byte-level tokenizer.")
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, target)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(_merges(size - len(alphabet)))
    vocab = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(target / "tokenizer.json"), pretty=False)
    (target / "tokenizer_config.json").write_text(json.dumps(FILES))
    return target


def _merges(count: int) -> Iterator[tuple[str, str]]:
    """Yield merges, each of which makes a word out of an earlier one and a letter. Shorter words come first."""
    words = list(LETTERS)
    for word in words:  # the list grows meanwhile
        for letter in LETTERS:
            if count == 0:
                return
            count -= 1
            words.append(word + letter)
            yield word, letter
