"""Times of words: a window's tokens are warped along the sound by their attention to it, as in Whisper's own code
(`timing.py` of openai/whisper).

Legend:
    T  tokens of a window
    F  frames of the encoder's output
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.text.speech.tokens import STEP

UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages that put no spaces between words
OPENING = frozenset("\"'¿-")  # marks that belong to the word behind them where a space is before them
BROKEN = "\ufffd"  # what tokens become that hold a part of a character


@dataclass
class SpokenWord:
    """A word with the marks around it. start, end: seconds from the beginning of the sound."""

    word: str
    start: float
    end: float


def token_ends(weight_TF: np.ndarray) -> list[float]:
    """Return the times at which a window's tokens end and the next ones begin, in seconds from its begin: the cheapest
    way through the weights enters each token's row there."""
    if not weight_TF.size:
        return [0.0] * len(weight_TF)
    tokens, frames = warped(-weight_TF.astype(np.float64))
    enters = np.diff(tokens, prepend=-1) > 0
    return [float(frame) * STEP for frame in frames[enters]]


def warped(cost_TF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the columns of the cheapest way from the first corner to the last: dynamic time warping.

    All cells whose row and column have one sum follow from those of the two sums before, so they are computed together.
    Of equally cheap steps the one along the row is taken. The time and the memory are those of a few arrays of the
    matrix's size, and one loop over T + F sums.
    """
    rows, columns = cost_TF.shape
    total = np.full((rows + columns + 1, rows + 1), np.inf, np.float32)  # by the sum of row and column, and by row
    step = np.zeros(total.shape, np.int8)
    total[0, 0] = 0
    for both in range(2, rows + columns + 1):
        low, high = max(1, both - columns), min(rows, both - 1) + 1
        row = np.arange(low, high)
        across, down, along = (
            total[both - 2, low - 1 : high - 1],
            total[both - 1, low - 1 : high - 1],
            total[both - 1, low:high],
        )
        is_across = (across < down) & (across < along)
        is_down = (down < across) & (down < along)
        least = np.where(is_across, across, np.where(is_down, down, along))
        total[both, low:high] = cost_TF[row - 1, both - row - 1] + least
        step[both, low:high] = np.where(is_across, 0, np.where(is_down, 1, 2))
    found, row, column = [(rows - 1, columns - 1)], rows, columns
    while row > 1 or column > 1:
        taken = 2 if row == 1 else 1 if column == 1 else step[row + column, row]
        row, column = row - (taken < 2), column - (taken != 1)
        found.append((row - 1, column - 1))
    way = np.array(found[::-1])
    return way[:, 0], way[:, 1]


def words_of(
    tokens: Sequence[int], spans: Sequence[tuple[float, float]], text_of: Callable[[Sequence[int]], str], language: str
) -> list[SpokenWord]:
    """Return the words of a text's tokens, which have these times. Characters are words in languages without spaces."""
    words = list[SpokenWord]()
    for text, start, end in _pieces(tokens, spans, text_of):
        if not words or language in UNSPACED or text[:1].isspace():
            words.append(SpokenWord(text, start, end))
        else:
            words[-1] = SpokenWord(words[-1].word + text, words[-1].start, end)
    return [SpokenWord(word.word.strip(), word.start, word.end) for word in _joined(words) if word.word.strip()]


def _pieces(
    tokens: Sequence[int], spans: Sequence[tuple[float, float]], text_of: Callable[[Sequence[int]], str]
) -> list[tuple[str, float, float]]:
    """Return the smallest runs of tokens that hold whole characters, with their times."""
    found, first = list[tuple[str, float, float]](), 0
    for n in range(len(tokens)):
        text = text_of(tokens[first : n + 1])
        if BROKEN in text and n + 1 < len(tokens):
            continue
        found.append((text, spans[first][0], spans[n][1]))
        first = n + 1
    return found


def _joined(words: Sequence[SpokenWord]) -> list[SpokenWord]:
    """Return words with the marks that belong to them. Those that open something belong to the next word."""
    found, opening = list[SpokenWord](), None
    for word in words:
        marks, kinds = word.word.strip(), {unicodedata.category(each) for each in word.word.strip()}
        if opening is not None:
            word, opening = SpokenWord(opening.word + word.word.lstrip(), opening.start, word.end), None
        if kinds and (kinds <= {"Ps", "Pi"} or (marks in OPENING and word.word[:1].isspace())):
            opening = word
        elif found and all(kind[0] == "P" for kind in kinds):
            found[-1] = SpokenWord(found[-1].word + word.word, found[-1].start, word.end)
        else:
            found.append(word)
    return found if opening is None else [*found, opening]
