"""Recognition of one sound: which windows are asked of the model with which tokens before them, and what becomes of its
answers. It does no input or output: `recognise` yields questions that may run together, and is sent their answers.

A window is decoded again at higher temperatures while its text repeats itself or is unlikely, and left out where
nobody speaks, as in Whisper's own code (`transcribe.py` of openai/whisper).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import exp
from typing import Any, Literal, NamedTuple
from zlib import compress

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.sounds import AlignedTokens, SpeechRules, Waveform
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.text.sounds import waveform
from ridgeline.text.speech.cuts import cut_at_silence
from ridgeline.text.speech.segments import SpokenSegment, WindowPart, parts_of, rest_of
from ridgeline.text.speech.tokens import SpeechTokens
from ridgeline.text.speech.words import SpokenWord, token_ends, words_of
from ridgeline.text.tokenizer import Tokenizer

HIGHER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures that are tried one after the other
UNLIKE = 0.5  # above this temperature a text is no context of the next window
AT_ONCE = 8  # windows of one sound that are asked together


@dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    """The wishes of a caller.

    language: None: it is told from the first window.
    prompt: text before the transcript.
    temperature: 0 begins with it, and goes up where a window's text is bad; others are taken as they are.
    timed: segments have times.
    word_timestamps: their words have times too, which takes one more step for each window.
    condition_on_previous_text: each window follows the text of the one before, so they run one after the other, and
        each begins where the model heard the last segment's end. Otherwise the sound is cut where it is quiet, and the
        windows run together.
    compression_ratio_threshold, logprob_threshold, no_speech_threshold: as in Whisper's own code; None: not looked at.
    max_tokens: of a window's output; None: half of the context, as in Whisper's own code.
    sampling: further fields of SamplingParams.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    timed: bool = True
    word_timestamps: bool = False
    condition_on_previous_text: bool = False
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def temperatures(self) -> tuple[float, ...]:
        return HIGHER if self.temperature == 0 else (self.temperature,)


class SpeechAsk(NamedTuple):
    """A question to the model: a window, and the tokens that its output follows."""

    sound: Waveform
    prompt: tuple[int, ...]
    params: SamplingParams
    rules: SpeechRules | None


class SpeechAnswer(NamedTuple):
    """token_ids, logprobs: of each token of the output. named: the log-probabilities of the tokens that were asked for
    by name, at the first place. aligned: as in `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    named: Sequence[float] = ()
    aligned: np.ndarray | None = None


@dataclass
class SpokenText:
    """The result. seconds: of the sound. asked, written: tokens that questions had before their outputs, and that these
    had."""

    language: str
    seconds: float
    segments: list[SpokenSegment] = field(default_factory=list)
    asked: int = 0
    written: int = 0

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


class DecodedWindow(NamedTuple):
    """tokens: without the end. average: the mean log-probability, the end's included. ratio: of the text's bytes to
    those of it when it is compressed. silent: the probability that nobody speaks. ends: of its tokens, in seconds from
    the window's begin, if words have times."""

    tokens: list[int]
    text: str
    temperature: float
    average: float
    ratio: float
    silent: float
    ends: Sequence[float] = ()


Asking = Generator[list[SpeechAsk], list[SpeechAnswer], None]


class Recogniser:
    """The recogniser of sounds with one model's tokens.

    most: tokens of an output together with those before it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: SpeechTokens, stem: SoundStem, most: int) -> None:
        self._tokenizer, self.tokens, self.stem, self._most = tokenizer, tokens, stem, most

    def recognise(self, samples_N: np.ndarray, options: SpeechOptions, found: SpokenText) -> Asking:
        """Fill `found`, segment by segment. Yield questions that may run together, and take their answers in the same
        order. Raise InvalidRequest for options that this model cannot follow."""
        if options.task == "translate" and not self.tokens.tasks:
            raise InvalidRequest("this model knows English alone, so it does not translate.", param="model")
        if options.word_timestamps and not options.timed:
            raise InvalidRequest("word_timestamps needs timed; set that too.", param="word_timestamps")
        if options.language is not None:
            found.language = self.tokens.code(options.language)
        elif not self.tokens.languages:
            found.language = "en"
        else:
            yield from self._detect(samples_N, found)
        if options.condition_on_previous_text:
            yield from self._in_turn(samples_N, options, found)
        else:
            yield from self._together(samples_N, options, found)

    def _detect(self, samples_N: np.ndarray, found: SpokenText) -> Asking:
        """Tell the language from the first window."""
        codes = list(self.tokens.languages)
        ids = [self.tokens.languages[code] for code in codes]
        [answer] = yield [self._probe(waveform(samples_N[: self.stem.samples]), (self.tokens.begins,), ids)]
        found.asked += 1
        found.language = codes[int(np.argmax(answer.named))]

    def _together(self, samples_N: np.ndarray, options: SpeechOptions, found: SpokenText) -> Asking:
        windows = cut_at_silence(samples_N, self.stem.samples)
        before = self._before(options.prompt)
        for first in range(0, len(windows), AT_ONCE):
            group = windows[first : first + AT_ONCE]
            sounds = [waveform(samples_N[start:end]) for start, end in group]
            decoded = yield from self._decode(sounds, [before] * len(sounds), options, found)
            for (start, end), result in zip(group, decoded, strict=True):
                if self._is_silent(result, options):
                    continue
                seconds = (end - start) / RATE
                parts = rest_of(result.tokens, self.tokens, seconds) if options.timed else [
                    WindowPart(0.0, seconds, result.tokens)
                ]  # fmt: skip
                self._add(parts, result, start, found, seconds)

    def _in_turn(self, samples_N: np.ndarray, options: SpeechOptions, found: SpokenText) -> Asking:
        start, context = 0, list(self._before(options.prompt)[1:])
        while len(samples_N) - start >= HOP or start == 0:
            piece = samples_N[start : start + self.stem.samples]
            seconds = len(piece) / RATE
            before = self._as_context(context)
            [result] = yield from self._decode([waveform(piece)], [before], options, found)
            step = seconds
            if not self._is_silent(result, options):
                parts, step = [WindowPart(0.0, seconds, result.tokens)], seconds
                if options.timed:
                    parts, step = parts_of(result.tokens, self.tokens, seconds)
                self._add(parts, result, start, found, seconds)
                context += [token for part in parts for token in part.tokens]
                context = [] if result.temperature > UNLIKE else context
            start += max(round(step * RATE), HOP)

    def _decode(
        self, sounds: list[Waveform], before: list[tuple[int, ...]], options: SpeechOptions, found: SpokenText
    ) -> Generator[list[SpeechAsk], list[SpeechAnswer], list[DecodedWindow]]:
        """Return the texts of windows. Those that are bad are asked for again, at the next temperature."""
        prefix = self.tokens.prefix(found.language, options.task, timed=options.timed)
        rules = self.tokens.rules(timed=options.timed)
        silent = [0.0] * len(sounds)
        done: dict[int, DecodedWindow] = {}
        for temperature in options.temperatures:
            left = [n for n in range(len(sounds)) if n not in done or self._is_bad(done[n], options)]
            first = not done and options.no_speech_threshold is not None
            asks = [self._ask(sounds[n], (*before[n], *prefix), rules, temperature, options) for n in left]
            if first:
                asks += [self._probe(sounds[n], (*before[n], prefix[0]), [self.tokens.silent]) for n in left]
            answers = yield asks
            found.asked += sum(len(ask.prompt) for ask in asks)
            if first:
                silent = [exp(answer.named[0]) for answer in answers[len(left) :]]
            for n, answer in zip(left, answers, strict=False):
                found.written += len(answer.token_ids)
                done[n] = self._decoded(answer, temperature, silent[n])
            if not any(self._is_bad(each, options) for each in done.values()):
                break
        results = [done[n] for n in range(len(sounds))]
        return (yield from self._aligned(sounds, results, found, options)) if options.word_timestamps else results

    def _aligned(
        self, sounds: list[Waveform], results: list[DecodedWindow], found: SpokenText, options: SpeechOptions
    ) -> Generator[list[SpeechAsk], list[SpeechAnswer], list[DecodedWindow]]:
        """Return windows with the times of their tokens, which the model reads once more."""
        prefix = self.tokens.prefix(found.language, options.task, timed=True)
        spoken = [n for n, result in enumerate(results) if result.text and not self._is_silent(result, options)]
        asks = [self._reread(sounds[n], prefix, results[n].tokens) for n in spoken]
        answers = (yield asks) if asks else []
        found.asked += sum(len(ask.prompt) for ask in asks)
        for n, answer in zip(spoken, answers, strict=True):
            ends = [] if answer.aligned is None else token_ends(answer.aligned)
            rest = len(results[n].tokens) - len(ends)
            results[n] = results[n]._replace(ends=[*ends, *(ends or [0.0])[-1:] * rest])
        return results

    def _decoded(self, answer: SpeechAnswer, temperature: float, silent: float) -> DecodedWindow:
        tokens = [token for token in answer.token_ids if token != self.tokens.end]
        text = self._text(tokens).strip()
        average = sum(answer.logprobs) / (len(tokens) + 1)
        data = text.encode()
        return DecodedWindow(tokens, text, temperature, average, len(data) / len(compress(data)), silent)

    def _is_bad(self, result: DecodedWindow, options: SpeechOptions) -> bool:
        ratio, least, silence = (
            options.compression_ratio_threshold, options.logprob_threshold, options.no_speech_threshold
        )  # fmt: skip
        unlikely = least is not None and result.average < least
        if silence is not None and result.silent > silence and unlikely:
            return False
        return unlikely or (ratio is not None and result.ratio > ratio)

    def _is_silent(self, result: DecodedWindow, options: SpeechOptions) -> bool:
        if options.no_speech_threshold is None or result.silent <= options.no_speech_threshold:
            return False
        return options.logprob_threshold is None or result.average <= options.logprob_threshold

    def _add(
        self, parts: list[WindowPart], result: DecodedWindow, start: int, found: SpokenText, seconds: float
    ) -> None:
        begin, numbers, first = start / RATE, count(len(found.segments)), 0
        for part in parts:
            text, first, own = self._text(part.tokens), first + len(part.tokens), first
            if not text.strip() or (part.start == part.end and len(parts) > 1):
                continue
            found.segments.append(
                SpokenSegment(
                    id=next(numbers),
                    seek=start // HOP,
                    start=round(begin + min(part.start, seconds), 3),
                    end=round(begin + min(part.end, seconds), 3),
                    text=text,
                    tokens=part.tokens,
                    temperature=result.temperature,
                    avg_logprob=result.average,
                    compression_ratio=result.ratio,
                    no_speech_prob=result.silent,
                    words=self._words(part, own, result.ends, begin, found.language),
                )
            )

    def _words(
        self, part: WindowPart, first: int, ends: Sequence[float], begin: float, language: str
    ) -> list[SpokenWord]:
        """Return the words of a part whose tokens begin at `first` of its window. None begins before the part does."""
        if not ends:
            return []
        before = (0.0, *ends)[first:]
        spelled, spans = list[int](), list[tuple[float, float]]()
        for token, start, end in zip(part.tokens, before, ends[first:], strict=False):
            if token < self.tokens.end:
                spelled.append(token)
                spans.append((begin + max(start, min(part.start, end)), begin + end))
        words = words_of(spelled, spans, self._text, language)
        return [SpokenWord(each.word, round(each.start, 3), round(each.end, 3)) for each in words]

    def _reread(self, sound: Waveform, prefix: Sequence[int], tokens: Sequence[int]) -> SpeechAsk:
        """Return the question for the attention of a window's tokens to its sound."""
        read = tokens[: self._most - len(prefix) - 1]
        frames = max(min(len(sound) // HOP // 2, self.stem.positions), 1)
        rules = SpeechRules(aligned=AlignedTokens(tokens=len(read), frames=frames, heads=self.tokens.heads))
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        return SpeechAsk(sound, (*prefix, *read), params, rules)

    def _ask(
        self,
        sound: Waveform,
        prompt: tuple[int, ...],
        rules: SpeechRules,
        temperature: float,
        options: SpeechOptions,
    ) -> SpeechAsk:
        room = self._most // 2 if options.max_tokens is None else options.max_tokens
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max(1, min(room, self._most - len(prompt))),
            logprobs=0,
            detokenize=False,
            **options.sampling,
        )
        return SpeechAsk(sound, prompt, params, rules)

    def _probe(self, sound: Waveform, prompt: tuple[int, ...], ids: list[int]) -> SpeechAsk:
        """Return the question for the log-probabilities of some tokens behind the transcript's begin."""
        params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=ids, detokenize=False, ignore_eos=True)
        return SpeechAsk(sound, prompt, params, None)

    def _before(self, prompt: str) -> tuple[int, ...]:
        return self._as_context(self._tokenizer.encode(" " + prompt.strip(), False) if prompt.strip() else [])

    def _as_context(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the end of a text as what stands before a transcript."""
        kept = tuple(tokens)[-(self._most // 2 - 1) :]
        return (self.tokens.before, *kept) if kept else ()

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < self.tokens.end])
