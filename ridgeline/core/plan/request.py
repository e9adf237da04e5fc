"""Requests as callers make them, and the engine's answers. Both hold token ids only; the caller keeps the text."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import Embeds, Inserted
from ridgeline.core.plan.sounds import SpeechRules, Waveform
from ridgeline.core.settings.steps import MAX_LOGPROBS as MAX_LOGPROBS
from ridgeline.core.settings.vllm_arguments import SAMPLING, with_vllms_fields
from ridgeline.core.specs.pooling import SECOND_TEXT, Task
from ridgeline.kernels.base.limits import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS
from ridgeline.kernels.base.limits import MAX_STOP_IDS as MAX_STOP_IDS

PEER = "@"  # begins the owner of a request that is known by its client's address
BACKGROUND = 2**31  # the priority of work for which no client waits, beyond what clients may ask for
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
MAX_BAD_WORDS = 1024
MAX_GUIDANCE = 100.0
MAX_NAMED = 128  # token ids whose logprobs a request may ask for by name
MAX_PATTERN = 1024  # tokens of a repeated pattern that is looked for
EVERY_LOGPROB = -1  # a count of logprobs that means the whole vocabulary
MASK_FAILED = "the token mask failed"  # begins the error of a request whose own mask ended it


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """The end of an output that repeats itself: its last tokens are one pattern, min_count times over.

    max_pattern_size: the most tokens of a pattern; 0 looks for none.
    min_pattern_size: the fewest tokens of a pattern; 0 is 1.
    min_count: how often the pattern must stand there, at least twice.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, most in (("max_pattern_size", MAX_PATTERN), ("min_pattern_size", MAX_PATTERN), ("min_count", 2**31)):
            value = getattr(self, name)
            if not _is_int(value) or not 0 <= value <= most:
                self._fail(f"{name} must be a whole number from 0 to {most}, got {value!r}")
        if self.min_pattern_size > self.max_pattern_size:
            self._fail(f"min_pattern_size is {self.min_pattern_size}, above max_pattern_size {self.max_pattern_size}")
        if self.max_pattern_size and self.min_count < 2:
            self._fail(f"min_count must be at least 2, got {self.min_count}")

    def _fail(self, sentence: str) -> NoReturn:
        raise InvalidRequest(f"repetition_detection: {sentence}.", param="repetition_detection")


@with_vllms_fields(SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The choice of tokens. Names and defaults are vLLM's, so code moves over by changing the import.

    n: completions per prompt; these are the likeliest n of best_of, if best_of is given.
    temperature: 0 is greedy.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the fewest likeliest tokens that together reach this probability.
    min_p: drop tokens that are less likely than this share of the likeliest token's probability.
    typical_p: keep this share of the probability, taking first the tokens whose information is nearest to the expected
        information (1 keeps all).
    repetition_penalty: divides the positive logits, and multiplies the negative logits, of tokens in prompt or output.
    presence_penalty: subtracted once from the logits of tokens in the output.
    frequency_penalty: subtracted once for each occurrence in the output.
    logit_bias: token id → a number that is added to the logit.
    allowed_token_ids: no other tokens may come.
    bad_words: texts (with and without a leading space) or lists of token ids that must not come, even if the prompt
        ended with the beginning of one.
    min_tokens: end-of-sequence and stop ids are forbidden until the output has so many tokens.
    stop: strings that end the text. They are cut off unless include_stop_str_in_output is set.
    logprobs: how many of the likeliest tokens to report for each output token (0: the chosen token alone; -1: all of
        the vocabulary).
    logprob_token_ids: report these tokens in place of the likeliest ones.
    prompt_logprobs: the same for the prompt, from its token prompt_logprobs_start on. (Tokens before that one may come
        from the cache.)
    repetition_detection: the output ends where it repeats itself so, with the finish reason "repetition". It may be an
        object with the fields of RepetitionDetectionParams.
    seed: the same seed gives the same tokens, whatever else runs in the batch.
    guidance_scale: classifier-free guidance (Sanchez et al., arXiv 2306.17806), off at 1. Before all other adjustments
        the log-probabilities c of the next token become scale * (c - u) + u. Here u are the log-probabilities after
        negative_prompt and the same output. Above 1 this leads away from the negative prompt; 0 follows it alone.
        Reported logprobs are those of the guided scores, but the prompt's own are plain. Guidance takes the cache and
        the time of two requests.
    negative_prompt: a text or token ids; the default is the prompt's last token.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str | list[int]] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    seed: int | None = None
    guidance_scale: float = 1.0
    negative_prompt: list[int] | str | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, FLOAT32_MAX)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("typical_p", 0.0, 1.0, open_low=True)
        self._number("repetition_penalty", FLOAT32_TINY, FLOAT32_MAX)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("guidance_scale", -MAX_GUIDANCE, MAX_GUIDANCE)
        self._integer("n", 1, MAX_N)
        self._integer("best_of", 1, MAX_N, optional=True)
        self._integer("top_k", -1, 2**31 - 1)
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)
        self._integer("min_tokens", 0, 2**31 - 1)
        self._integer("logprobs", EVERY_LOGPROB, 2**31 - 1, optional=True)
        self._integer("prompt_logprobs", EVERY_LOGPROB, 2**31 - 1, optional=True)
        self._integer("prompt_logprobs_start", 0, 2**31 - 1)
        self._integer("seed", -(2**63), 2**64 - 1, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                self._fail(name, f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._fail("min_tokens", f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            self._fail("best_of", f"best_of is {self.best_of}, below n {self.n}: there would be too few to choose from")
        if self.temperature == 0 and self.num_drawn > 1:
            name = "n" if self.n > 1 else "best_of"
            self._fail(
                name, f"{name} is {self.num_drawn} with temperature 0: greedy completions would all be equal; use 1"
            )
        self._check_stops()
        self._check_logit_bias()
        self._check_allowed()
        self._check_bad_words()
        self._check_negative_prompt()
        self._check_named()
        repetition: Any = self.repetition_detection
        if isinstance(repetition, Mapping):
            object.__setattr__(self, "repetition_detection", _repetition_detection(repetition))
        elif not isinstance(repetition, (RepetitionDetectionParams, type(None))):
            self._fail(
                "repetition_detection",
                f"repetition_detection takes max_pattern_size, min_pattern_size and min_count, got {repetition!r}",
            )

    @property
    def is_bounded(self) -> bool:
        """True if the operator's bound on logprobs holds, because a client sees them."""
        return True

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens reported beside each output token. None: no logprobs are reported."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def num_drawn(self) -> int:
        """The number of completions that are drawn; n of them are kept."""
        return self.n if self.best_of is None else self.best_of

    @property
    def scored_from(self) -> int | None:
        """Index of the first prompt token whose logprob is reported; None if none is. Token 0 has none, since nothing
        precedes it."""
        return None if self.prompt_logprobs is None else max(1, self.prompt_logprobs_start)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_stops(self) -> None:
        stops = self.stop_strings if isinstance(self.stop, (str, list, tuple, type(None))) else (None,)
        if len(stops) > MAX_STOP_STRINGS or not all(
            isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops
        ):
            self._fail(
                "stop",
                f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters, "
                f"got {_shortened(self.stop)}",
            )
        if (half := next((s for s in stops if isinstance(s, str) and not _is_whole(s)), None)) is not None:
            self._fail("stop", f"stop has {_shortened(half)}, with half of a surrogate pair, which no text has")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if (
            not isinstance(ids, (list, tuple))
            or len(ids) > MAX_STOP_IDS - 8
            or not all(_is_int(i) and i >= 0 for i in ids)
        ):
            self._fail(
                "stop_token_ids",
                f"stop_token_ids takes a list of at most {MAX_STOP_IDS - 8} token ids, got {_shortened(ids)}",
            )

    def _check_allowed(self) -> None:
        ids = self.allowed_token_ids
        if ids is not None and not (isinstance(ids, (list, tuple)) and ids and _are_ids(ids)):
            self._fail("allowed_token_ids", f"allowed_token_ids takes a list of token ids, got {_shortened(ids)}")

    def _check_bad_words(self) -> None:
        words = [] if self.bad_words is None else self.bad_words
        listed = isinstance(words, (list, tuple)) and len(words) <= MAX_BAD_WORDS
        if not listed or not all(
            isinstance(w, (str, list, tuple)) and w and (isinstance(w, str) or _are_ids(w)) for w in words
        ):
            self._fail(
                "bad_words",
                f"bad_words takes at most {MAX_BAD_WORDS} texts or lists of token ids, got {_shortened(words)}",
            )

    def _check_named(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_NAMED or not _are_ids(ids):
            self._fail(
                "logprob_token_ids", f"logprob_token_ids takes 1 to {MAX_NAMED} token ids, got {_shortened(ids)}"
            )
        if self.logprobs not in (None, 0, len(ids)):
            self._fail(
                "logprob_token_ids",
                f"logprobs is {self.logprobs} beside {len(ids)} logprob_token_ids; leave it out, or give {len(ids)}",
            )

    def _check_negative_prompt(self) -> None:
        prompt = self.negative_prompt
        if prompt is None:
            return
        if not isinstance(prompt, str) and not (isinstance(prompt, (list, tuple)) and prompt and _are_ids(prompt)):
            self._fail(
                "negative_prompt", f"negative_prompt takes a text or a list of token ids, got {_shortened(prompt)}"
            )
        if self.guidance_scale == 1:
            self._fail("negative_prompt", "negative_prompt does nothing at guidance_scale 1; give another scale")

    def _check_logit_bias(self) -> None:
        bias: object = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, dict):
            self._fail("logit_bias", f"logit_bias maps token ids to -100..100, got {_shortened(bias)}")
        if len(bias) > MAX_LOGIT_BIAS:
            self._fail("logit_bias", f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, value in bias.items():
            if not (_is_int(token) and token >= 0 and _is_real(value) and -100 <= value <= 100):
                self._fail("logit_bias", f"logit_bias maps token ids to -100..100, got {token!r}: {value!r}")

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not low <= value <= high or (open_low and value == low):
            span = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
            self._fail(name, f"{name} must be {span}, got {value!r}")

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not _is_int(value) or not low <= value <= high:
            self._fail(name, f"{name} must be a whole number from {low} to {high}, got {value!r}")

    def _fail(self, name: str, sentence: str) -> NoReturn:
        raise InvalidRequest(sentence + ".", param=name)

    def replace(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)


def _is_whole(text: str) -> bool:
    """Return True if a text has no half of a surrogate pair, which UTF-8, and so a message to a rank, cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shortened(value: object, limit: int = 80) -> str:
    if isinstance(value, (str, list, tuple)):
        value = value[: limit + 1]  # no more is shown
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def _repetition_detection(given: Mapping[str, Any]) -> RepetitionDetectionParams:
    known = {each.name for each in dataclasses.fields(RepetitionDetectionParams)}
    unknown = sorted(map(str, given.keys() - known))
    if unknown:
        raise InvalidRequest(
            f"repetition_detection has {', '.join(sorted(known))}, and no {unknown[0][:80]}.",
            param="repetition_detection",
        )
    return RepetitionDetectionParams(**given)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _are_ids(values: Sequence[object]) -> bool:
    if set(map(type, values)) == {int}:  # the usual case, in which a million ids take a hundredth of a second
        return min(values) >= 0  # type: ignore[type-var,operator]
    return all(_is_int(value) and value >= 0 for value in values)  # type: ignore[operator]


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool) and value == value


class TokenMask(Protocol):
    """A constraint on one request's next token, such as a grammar. It runs in the engine between two steps.

    The mask of step k may depend on every token before it, so such a request has `lookahead` 1: its forward segment is
    launched early, and its sample segment waits for `allowed`.
    """

    def accept(self, token_id: int) -> None:
        """Advance over one emitted token."""

    def allowed(self) -> np.ndarray:
        """Return the set of tokens that may come next: uint32 words of packed bits (`core.plan.token_bits`) for the
        whole vocabulary.

        Bits beyond the vocabulary are 0. The array is valid until the next call of `accept` or `allowed`, and the
        caller must not write to it. A class may also have a static method `prepare(masks)`. It is called with all masks
        of the class that are about to be asked, so that it can do at once what they have in common. It must not fail
        because of a single mask.
        """


class DraftingMask(TokenMask, Protocol):
    """A mask that can advance along drafts, tokens that may turn out wrong, and go back.

    walks: it really can; a mask that holds another one depends on that.
    """

    @property
    def walks(self) -> bool: ...

    def forced(self) -> Sequence[int]:
        """Return tokens that should come next, because what is allowed goes on with their text. They are a guess: the
        same text may be made of other tokens, and another text may be allowed that has no token of its own."""

    def save(self) -> object:
        """Return the state that the mask is in, for `restore`, which follows whatever happens."""

    def restore(self, state: object) -> None:
        """Go back to a saved state, over `MOST_DRAFTS` tokens at most and even if the mask has failed since."""


def drafting(mask: TokenMask | None) -> DraftingMask | None:
    """Return the mask if it can be led along drafts, else None."""
    return cast("DraftingMask", mask) if getattr(mask, "walks", False) else None


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The tokens that a request's reasoning is made of, so that the engine can bound it and knows where it ends.

    inside: the prompt ends within the reasoning. Otherwise the output may begin it.
    begins, ends: tokens that begin and end it, each in the ways in which it is written.
    opening: tokens that the output must begin with.
    closing: tokens that end it once its budget is spent.
    budget: the most tokens that it may have (None: there is no bound).
    may_stop: the output may end within it, even if a mask waits for its end.
    """

    inside: bool
    begins: tuple[tuple[int, ...], ...] = ()
    ends: tuple[tuple[int, ...], ...]
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...]
    budget: int | None = None
    may_stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion of one prompt (`n` completions are `n` requests, which share the prompt through the cache).

    lookahead: 2: the next plan may be made before the last token is known. 1: only the next sampling needs the last
        result. 0: the next plan needs it.
    cache_salt: separates tenants. Prefix hits happen only between requests with equal salts.
    priority: smaller numbers run first (with the priority policy only). BACKGROUND is preempted for all others, with
        every policy.
    task: what a model that pools makes of the prompt; None: the request generates. `max_total_tokens` is then the
        length of the prompt.
    whole: all of the prompt runs in one step, and none of it is taken from the cache.
    second_text: the first token of the second text of a pair; 0: there is one text.
    thinking: the output may begin with reasoning, which is bounded, and to which the token mask does not apply.
    embeds: the prompt's vectors, whose tokens are placeholders. Such a prompt neither takes from the prefix cache nor
        leaves anything there.
    inserted: vectors in the place of some of the prompt's tokens.
    encoder_ids: what a model with an encoder reads; the prompt is then where its output begins. Such a request neither
        takes from the prefix cache nor leaves anything there.
    sound: what the encoder reads instead, if that reads sounds; `encoder_ids` then only count its outputs.
    speech: the rules of a recogniser's output; None: there are none.
    prefix_keys: further things that a state depends on, such as an adapter's content or the version of the weights.
        Prefix hits happen only between requests with equal keys.
    adapter: the number of the adapter that it runs with, under which the worker knows it; 0: none. Its prefix keys name
        the adapter's content.
    owner: whose request it is. Owners have equal shares of the engine, or those of their weights (`tenant_weights`).
    slo_ttft, slo_itl: seconds until the first token and between tokens that the request asks for (with the slo policy
        only); 0: as the engine's settings say.
    session, keep: of what the request leaves in the cache: the name of the session whose next turn goes on with it, and
        for how many seconds it is kept ahead of other idle blocks; 0: it is not.
    block_hashes: of the prompt's first blocks, as the cache chains them, if the caller has computed them already.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    priority: int = 0
    lookahead: int = 2
    token_mask: TokenMask | None = None
    thinking: Thinking | None = None
    arrival: float = field(default_factory=time.monotonic)
    task: Task | None = None
    whole: bool = False
    second_text: int = 0
    embeds: Embeds | None = None
    inserted: tuple[Inserted, ...] = ()
    encoder_ids: tuple[int, ...] = ()
    sound: Waveform | None = None
    speech: SpeechRules | None = None
    prefix_keys: tuple[str, ...] = ()
    adapter: int = 0
    owner: str = ""
    slo_ttft: float = 0.0
    slo_itl: float = 0.0
    session: str = ""
    keep: float = 0.0
    block_hashes: tuple[bytes, ...] = ()

    @property
    def background(self) -> bool:
        """True if no client waits for this request, so that it is preempted for all others."""
        return self.priority >= BACKGROUND

    @property
    def salt_owner(self) -> str:
        """The first line of the salt, by which a tier on a disk counts blocks. Salts of one owner may go on behind it:
        hashes of blocks cover all of a salt."""
        return self.cache_salt.partition("\n")[0]

    @property
    def input_ids(self) -> list[int]:
        """The prompt as it runs: tokens of the second text of a pair are marked."""
        ids, second = self.prompt_token_ids, self.second_text
        return [*ids[:second], *(i | SECOND_TEXT for i in ids[second:])] if second else list(ids)

    @property
    def all_inserted(self) -> tuple[Inserted, ...]:
        """Vectors in the place of some of the prompt's tokens, or of all of them."""
        return (
            self.inserted if self.embeds is None else (Inserted(start=0, count=len(self.embeds), embeds=self.embeds),)
        )

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt's tokens; none if they are placeholders."""
        return self.prompt_token_ids if self.embeds is None else ()

    @property
    def read_tokens(self) -> int:
        """The number of tokens that the model reads before it writes: the prompt's and the encoder input's."""
        return len(self.prompt_token_ids) + len(self.encoder_ids)

    @property
    def all_stop_ids(self) -> frozenset[int]:
        """The token ids that end the request, which min_tokens forbids at first."""
        return self.stop_ids if self.params.ignore_eos else self.stop_ids | self.eos_ids

    @property
    def cache_tokens(self) -> int:
        """The most tokens that the request may have in the cache, those of its encoder input and of a guided request's
        companion included."""
        if self.params.guidance_scale == 1:
            return self.max_total_tokens + len(self.encoder_ids) + sum(each.across for each in self.inserted)
        return 2 * self.max_total_tokens - len(self.prompt_token_ids) + len(self._negative)

    @property
    def _negative(self) -> Sequence[Any]:
        """The negative prompt of a guided request."""
        return self.params.negative_prompt or self.prompt_token_ids[-1:]

    def companion(self) -> Request | None:
        """Return the request that guidance compares a guided request with: the same output after the negative prompt.
        None for other requests.

        The companion's output is this request's, so its seed and mask do not matter, and only this request reports
        logprobs.
        """
        if self.params.guidance_scale == 1:
            return None
        negative = tuple(map(int, self._negative))
        return dataclasses.replace(
            self,
            id=f"{self.id} (negative prompt)",
            prompt_token_ids=negative,
            inserted=(),
            block_hashes=(),
            params=self.params.replace(guidance_scale=1.0, negative_prompt=None, logprobs=None, prompt_logprobs=None),
            max_total_tokens=self.max_total_tokens - len(self.prompt_token_ids) + len(negative),
            token_mask=None,
            thinking=None,
        )


class TokenLogprobs(NamedTuple):
    """The logprob and rank (1 = likeliest) of one token, and the likeliest tokens in its place, or those that the
    request names."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of prompt tokens that follow one another, as the bytes of arrays: messages carry these as they are,
    and there is nothing for the garbage collector to visit. Iterating yields them one by one.

    logprobs, ranks: float32 and int32 [T], one for each token.
    top_ids, top_logprobs: int32 and float32 [T, L], the likeliest tokens of each place.
    """

    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[TokenLogprobs]:
        width = len(self.top_ids) // max(len(self.ranks), 1)
        logprobs, top_logprobs = array("f", self.logprobs), array("f", self.top_logprobs)
        ranks, top_ids = array("i", self.ranks), array("i", self.top_ids)
        for i, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
            own = slice(i * width, (i + 1) * width)
            yield TokenLogprobs(logprob, rank, top_ids[own].tolist(), top_logprobs[own].tolist())


class TokenEvent(NamedTuple):
    """The part of a step's outcome that concerns one request.

    token_id: -1 if no token came: the request ended without one, or it ran a chunk of its prompt.
    vector: what the prompt was pooled to, float32 [M], or [T, M] with one for each of its tokens. For a request with
        `SpeechRules.aligned`, which draws tokens too: the attention of these tokens, [T, F] (`worker/alignment.py`).
    prompt_logprobs: those of the next prompt tokens, in order. The first prompt token has none and is not counted.
    """

    request_id: str
    token_id: int
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    vector: np.ndarray | None = None


@dataclass(slots=True)
class StepEvents:
    """The outcome of one step for all requests.

    Most requests get a token and nothing else. `ids` and `token_ids` hold these side by side, since an object for each
    would cost as much as the rest of the step. `events` holds all others. Iterating yields both.
    """

    ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def __iter__(self) -> Iterator[TokenEvent]:
        yield from map(TokenEvent, self.ids, self.token_ids)
        yield from self.events


class Preemption(StrEnum):
    """The reason why a running request lost its slot and its blocks and starts over."""

    BLOCKS = "blocks"  # a request before it in the order needed its blocks
    PRIORITY = "priority"  # a waiting request outranks it
    RECOVERY = "recovery"  # a step failed, and everything starts over
    SLEEP = "sleep"  # the engine gave its memory back
    NOT_NUMBERS = "not_numbers"  # its scores were NaN; it runs again without the blocks it shared


class WeightSpan(NamedTuple):
    """The output tokens from `start` to before `end`, which weights of this version drew."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """The times of a request, in seconds on the monotonic clock.

    preempted_for: how often it started over, by the reason.
    weight_versions: which weights drew its tokens, where a server's engine ran it.
    """

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preempted_for: Mapping[Preemption, int] = field(default_factory=dict)
    weight_versions: tuple[WeightSpan, ...] = ()

    @property
    def preemptions(self) -> int:
        return sum(self.preempted_for.values())
