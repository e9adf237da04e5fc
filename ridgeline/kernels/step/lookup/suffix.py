"""Suffix decoding in one text (Oliaro et al., arXiv 2411.04975): of all places where a text's end stood before, the
continuation that followed most often is drafted, up to the token where it was too rare.

A suffix tree would give the same counts. A search makes them from the text, as prompt lookup does, and looks closer at
few places alone: at those where the longest match stood, and at those of each shorter match that stood more often.

Legend:
    N  tokens of the text
    X  places behind a match
"""

from __future__ import annotations

import numpy as np

MOST_PLACES = 256  # behind a match that are counted, the latest ones
MOST_SEARCHED = 4096  # places of the last token, the latest ones: a text of one token has as many as it has tokens


def continued_by_share(
    known_N: np.ndarray, count: int, longest: int, factor: float, least: float
) -> tuple[np.ndarray, int]:
    """Return up to `count` drafts of what follows a text, and the number of tokens that their match shares.

    A match of n tokens, `longest` at most, has up to factor · n drafts. The probability of a draft is the product of
    the shares of places at which it, and each draft before it, followed. Drafts end where it falls below `least`. Of
    all matches the one wins whose drafts have the highest sum of probabilities, and of equal ones the longest.
    """
    end, best, best_score, best_shared = len(known_N), known_N[:0], 0.0, 0
    at_X = np.flatnonzero(known_N[: end - 1] == known_N[-1]) + 1 if end > 1 and count else np.empty(0, np.intp)
    at_X, length = at_X[-MOST_SEARCHED:], 1
    while len(at_X):
        longer_X = at_X[at_X > length] if length < longest else at_X[:0]
        longer_X = longer_X[known_N[longer_X - length - 1] == known_N[end - length - 1]]
        if len(longer_X) < len(at_X):  # else the longer match has the same drafts, and more of them
            drafts, score = _likeliest(known_N, at_X[-MOST_PLACES:], min(count, int(factor * length + 1e-6)), least)
            if score >= best_score and len(drafts):
                best, best_score, best_shared = drafts, score, length
        at_X, length = longer_X, length + 1
    return best, best_shared


def _likeliest(known_N: np.ndarray, at_X: np.ndarray, count: int, least: float) -> tuple[np.ndarray, float]:
    """Return the likeliest tokens behind these places, one after the other, and the sum of their probabilities."""
    end, found, probability, score = len(known_N), list[int](), 1.0, 0.0
    while len(found) < count and len(at_X):
        if len(at_X) == 1:  # the match may overlap its own continuation
            start, left = int(at_X[0]) - len(found), count - len(found)
            found += known_N[start + np.arange(len(found), count) % (end - start)].tolist()
            return np.array(found, known_N.dtype), score + probability * left
        follows_X = known_N[at_X]
        token, often = _mode(follows_X)
        probability *= often / len(at_X)
        if probability < least:
            break
        found.append(token)
        score += probability
        at_X = at_X[follows_X == token] + 1
        at_X = at_X[at_X < end]
    return np.array(found, known_N.dtype), score


def _mode(token_X: np.ndarray) -> tuple[int, int]:
    """Return the token that stands there most often, of equally frequent ones the last, and how often it does."""
    values, first, counts = np.unique(token_X[::-1], return_index=True, return_counts=True)
    most = counts.max()
    index = int(np.where(counts == most, first, len(token_X)).argmin())
    return int(values[index]), int(most)
