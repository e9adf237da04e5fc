"""A window's tokens as segments with times, as Whisper's own code takes them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.text.speech.tokens import STEP, SpeechTokens
from ridgeline.text.speech.words import SpokenWord


@dataclass
class SpokenSegment:
    """A part of a transcript. start, end: seconds from the beginning of the sound.

    seek: the begin of its window, in hundredths of a second.
    words: with times, if these were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[SpokenWord] = field(default_factory=list)


class WindowPart(NamedTuple):
    """start, end: seconds from the window's begin. tokens: with the times around them."""

    start: float
    end: float
    tokens: list[int]


def parts_of(tokens: Sequence[int], known: SpeechTokens, seconds: float) -> tuple[list[WindowPart], float]:
    """Return the parts of a window of so many seconds, and the seconds after which the next window begins, so that
    speech which the window cuts is heard again."""
    timed = [token >= known.times for token in tokens]
    ends = [n for n in range(1, len(tokens)) if timed[n - 1] and timed[n]]
    if not ends:
        return [_only_part(tokens, timed, known, seconds)], seconds
    ended = timed[-2:] == [False, True]  # nothing is said after this time
    found, first = list[WindowPart](), 0
    for end in [*ends, len(tokens)] if ended else ends:
        piece = list(tokens[first:end])
        found.append(WindowPart((piece[0] - known.times) * STEP, (piece[-1] - known.times) * STEP, piece))
        first = end
    return found, seconds if ended else (tokens[first - 1] - known.times) * STEP


def _only_part(tokens: Sequence[int], timed: Sequence[bool], known: SpeechTokens, seconds: float) -> WindowPart:
    """Return all of a window in which no part follows another. It begins at the time before its text, where Whisper's
    own code takes the window's begin, and ends at the last time, unless that is the window's begin too."""
    times = [(token - known.times) * STEP for token, is_time in zip(tokens, timed, strict=True) if is_time]
    led = bool(times) and timed[0]
    end = times[-1] if times and times[-1] > 0 and not (led and len(times) == 1) else seconds
    return WindowPart(min(times[0], end) if led else 0.0, end, list(tokens))


def rest_of(tokens: Sequence[int], known: SpeechTokens, seconds: float) -> list[WindowPart]:
    """Return the parts of a window behind which nothing is heard again: one that it cuts ends with it."""
    found, goes_on = parts_of(tokens, known, seconds)
    taken = sum(len(part.tokens) for part in found)
    if taken < len(tokens):
        rest = list(tokens[taken:])
        start = (rest[0] - known.times) * STEP if rest[0] >= known.times else goes_on
        last = (rest[-1] - known.times) * STEP if len(rest) > 1 and rest[-1] >= known.times else seconds
        found.append(WindowPart(start, max(start, last), rest))
    return found
