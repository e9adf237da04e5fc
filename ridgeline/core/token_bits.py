"""Sets of tokens as packed bits: token t is bit t % 32 of word t // 32. 152,000 tokens take 19 KB.

Legend: V vocabulary, W words.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

WORD = 32


def num_words(vocab_size: int) -> int:
    """Words that so many tokens take."""
    return -(-vocab_size // WORD)


def packed(members_V: np.ndarray) -> np.ndarray:
    """uint32 [W] of bool [V]; bits beyond the vocabulary are 0."""
    padded = np.zeros(num_words(len(members_V)) * WORD, np.bool_)
    padded[: len(members_V)] = members_V
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpacked(bits_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [V] of uint32 [W]."""
    return np.unpackbits(bits_W.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def without(bits_W: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    """A copy that lacks some tokens."""
    left_W = bits_W.copy()
    for token in token_ids:
        left_W[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    return left_W
