"""Sets of tokens as packed bits: token t is bit t % 32 of word t // 32. A vocabulary of 152,000 tokens takes 19 KB.

Legend:
    V  vocabulary
    W  words of 32 bits
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

WORD = 32


def num_words(vocab_size: int) -> int:
    """Return the number of words for a vocabulary of this size."""
    return -(-vocab_size // WORD)


def packed(members_V: np.ndarray) -> np.ndarray:
    """Pack bool [V] into uint32 [W]; bits beyond the vocabulary are 0."""
    padded = np.zeros(num_words(len(members_V)) * WORD, np.bool_)
    padded[: len(members_V)] = members_V
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpacked(bits_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """Unpack uint32 [W] into bool [V]."""
    return np.unpackbits(bits_W.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def part_of(bits_W: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return the bits of the tokens `first` … first + count - 1, which are numbered from 0. There may be fewer tokens;
    what lies beyond `count` in the last word means nothing."""
    start, shift = divmod(first, WORD)
    words_W = np.zeros(num_words(count) + 1, np.uint32)
    found_W = bits_W[start : start + len(words_W)]
    words_W[: len(found_W)] = found_W
    if shift == 0:
        return words_W[:-1]
    return (words_W[:-1] >> np.uint32(shift)) | (words_W[1:] << np.uint32(WORD - shift))


def is_empty(bits_W: np.ndarray) -> bool:
    """Return True if no bit is set. The words are read as bytes, for which `any` stops at the first one
    that is not 0."""
    return not bits_W.view(np.bool_).any()


def has(bits_W: np.ndarray, token: int) -> bool:
    """Return True if the token is in the set."""
    return bool(int(bits_W[token // WORD]) >> token % WORD & 1)


def only(bits_W: np.ndarray) -> int | None:
    """Return the token of a set that has one, or None."""
    if np.count_nonzero(bits_W) != 1:
        return None
    at = int(bits_W.argmax())
    word = int(bits_W[at])
    return None if word & (word - 1) else WORD * at + word.bit_length() - 1


class Few:
    """A few tokens that are to be removed from many sets."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        kept: dict[int, int] = {}
        for token in token_ids:
            kept[token // WORD] = kept.get(token // WORD, 0xFFFFFFFF) & ~(1 << token % WORD)
        self._words, self._kept = np.array(list(kept), np.intp), np.array(list(kept.values()), np.uint32)

    def remove(self, bits_W: np.ndarray) -> np.ndarray:
        """Remove the tokens from `bits_W` in place; return what `restore` needs to undo it."""
        before = bits_W[self._words]
        bits_W[self._words] = before & self._kept
        return before

    def restore(self, bits_W: np.ndarray, before: np.ndarray) -> None:
        """Undo `remove`."""
        bits_W[self._words] = before
