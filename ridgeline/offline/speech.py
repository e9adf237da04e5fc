"""Transcripts by an LLM in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.base.sounds import RATE
from ridgeline.media.bounds import MediaBounds
from ridgeline.media.pool import Decoders, NoMemory
from ridgeline.offline.jobs import Job, JobMaker
from ridgeline.text.outputs import RequestOutput
from ridgeline.text.sounds import samples_of
from ridgeline.text.speech.answers import answer_of
from ridgeline.text.speech.recogniser import Recogniser, SpeechAnswer, SpeechOptions, SpokenText
from ridgeline.text.speech.segments import SpokenSegment
from ridgeline.text.speech.tokens import SpeechTokens
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.json_file import read_json

MOST_BYTES, MOST_SECONDS = 1 << 30, 3600  # of a file that is read here
MOST_DECODING = 600.0  # seconds of the processor


def recogniser_of(tokenizer: Tokenizer, folder: Path, stem: SoundStem, most: int) -> Recogniser:
    """Return a recogniser with a model's tokens. most: of its context. Raise ModelLoadError."""
    tokens = SpeechTokens.of(tokenizer, read_json(folder / "generation_config.json"))
    return Recogniser(tokenizer, tokens, stem, most)


def heard(audio: Any) -> np.ndarray:
    """Return a file's samples, or a caller's, in the models' rate. Raise InvalidRequest."""
    if isinstance(audio, (str, Path)):
        try:
            audio = Path(audio).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{audio} cannot be read ({error.strerror}); name another.", param="audio") from error
    if not isinstance(audio, bytes):
        return samples_of(audio)
    bounds = MediaBounds(file_bytes=MOST_BYTES, sound_seconds=MOST_SECONDS, seconds=MOST_DECODING)
    try:
        return Decoders(bounds).sound(audio, rate=RATE).samples_N
    except NoMemory as error:
        raise InvalidRequest(f"{error}; give fewer files at a time.", param="audio") from None


def speech_options(wishes: Mapping[str, Any]) -> SpeechOptions:
    """Return options of these names. Raise InvalidRequest for others."""
    known = [each.name for each in fields(SpeechOptions)]
    if unknown := sorted(wishes.keys() - {*known}):
        raise InvalidRequest(f"transcribe takes {', '.join(known)}, and no {unknown[0][:40]}.", param=unknown[0][:40])
    return SpeechOptions(**wishes)


class Transcripts:
    """Runs the questions of recognisers as jobs."""

    def __init__(
        self, recogniser: Recogniser, jobs: JobMaker, finish: Callable[[Sequence[Job]], list[RequestOutput]]
    ) -> None:
        self._recogniser, self._jobs, self._finish = recogniser, jobs, finish

    def segments(
        self, samples_N: np.ndarray, options: SpeechOptions, found: SpokenText, cache_salt: str = ""
    ) -> Iterator[SpokenSegment]:
        """Yield the segments as they come, which fill `found`."""
        asking, told = self._recogniser.recognise(samples_N, options, found), 0
        answers: list[SpeechAnswer] | None = None
        while True:
            try:
                asks = next(asking) if answers is None else asking.send(answers)
            except StopIteration:
                yield from found.segments[told:]
                return
            yield from found.segments[told:]
            told = len(found.segments)
            results = self._finish([self._jobs.make(ask, ask.params, cache_salt=cache_salt) for ask in asks])
            answers = [answer_of(ask, result) for ask, result in zip(asks, results, strict=True)]

    def transcript(self, samples_N: np.ndarray, options: SpeechOptions, cache_salt: str = "") -> SpokenText:
        found = SpokenText("", len(samples_N) / RATE)
        for _ in self.segments(samples_N, options, found, cache_salt):
            pass
        return found
