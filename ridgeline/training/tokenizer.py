"""Byte-level BPE for source code, and conversion of documents to token ids.

The pre-tokenizer keeps a newline and the indentation after it together, so the start of a line is one token. Words
carry one leading space or punctuation mark, and digits come in threes at most. Any byte string is representable.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEPARATOR = "<|endoftext|>"
SEPARATOR_ID = 0
_WORDS = r"\s*\n\s*|[^\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Sequence[str], vocab_size: int, *, sample_bytes: int, seed: int) -> Tokenizer:
    """Return a BPE of `vocab_size` ids learnt from about `sample_bytes` of `texts`, drawn at random.

    Id 0 separates documents: it begins every prompt and ends a generation.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts, sample_bytes, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", pair=f"{SEPARATOR} $A $B", special_tokens=[(SEPARATOR, SEPARATOR_ID)]
    )
    return tokenizer


def _sample(texts: Sequence[str], size: int, seed: int) -> Iterator[str]:
    for index in random.Random(seed).sample(range(len(texts)), len(texts)):
        if size <= 0:
            return
        size -= len(texts[index])
        yield texts[index]


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the uint16 token ids of each text, without the separator. Text that looks like the separator stays text."""
    tokenizer.encode_special_tokens = True
    try:
        for start in range(0, len(texts), 512):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 512], add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint16)
    finally:
        tokenizer.encode_special_tokens = False


# The model has learnt code and not conversation, so it continues what was said, one message per line.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json in Hugging Face's form."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
