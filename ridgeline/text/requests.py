"""Conversion of a prompt and its sampling parameters to the requests that the engine runs, one for each completion."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.embeds import Embeds, Inserted, named_within
from ridgeline.core.plan.request import EVERY_LOGPROB, MAX_LOGPROBS, MAX_STOP_IDS, Request, SamplingParams
from ridgeline.core.plan.sounds import SpeechRules, Waveform
from ridgeline.core.specs.stem import SoundStem
from ridgeline.media.items import HeardVectors, SeenVectors
from ridgeline.models.config import SAMPLING_DEFAULTS
from ridgeline.text.tokenizer import Tokenizer

# Logprobs that a request may have reported in all, if it asks for more than MAX_LOGPROBS for a token. Each takes some
# hundred bytes.
MOST_REPORTED = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits of the engine and the model on every request. `max_logprobs` is -1 if all of the vocabulary may be
    reported. `embeds_width` is that of vectors that prompts may be made of; 0: they may not. `decoder_start` are the
    tokens that outputs of a model with an encoder follow, which reads the prompts; other models have none. `stem` says
    which sounds the encoder reads; None: it reads tokens."""

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_logprobs: int = MAX_LOGPROBS
    embeds_width: int = 0
    decoder_start: tuple[int, ...] = ()
    stem: SoundStem | None = None


class Heard(NamedTuple):
    """The sound that a request reads, and the rules of what it writes."""

    sound: Waveform
    rules: SpeechRules | None = None


def make_requests(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: RequestLimits,
    *,
    seed: int,
    priority: int = 0,
    cache_salt: str = "",
    embeds: Embeds | None = None,
    inserted: tuple[Inserted, ...] = (),
    heard: Heard | None = None,
) -> list[Request]:
    """Return `params.num_drawn` requests with ids "<request_id>-<i>" and seeds of their own.

    `seed` is used if the parameters name none. inserted: what stands in the place of some of the prompt's tokens. A
    model that reads sounds reads that of `heard`, and its output follows the prompt. Raise InvalidRequest if the
    parameters do not fit this model.
    """
    if embeds is not None:
        check_width(embeds.width, limits)
    _check_ids(params, limits)
    params = _counted(params, limits)
    if params.num_drawn > params.n and params.logprobs is None:
        params = params.replace(logprobs=0)  # needed for the choice among completions
    negative = params.negative_prompt or ()
    encoder_ids = tuple(prompt_token_ids) if limits.decoder_start else ()
    if limits.stem is not None:
        if heard is None:
            raise InvalidRequest("this model reads sounds; give multi_modal_data with audio.", param="prompt")
        encoder_ids = (0,) * limits.stem.positions
    else:
        prompt_token_ids = limits.decoder_start or prompt_token_ids
    room = limits.max_model_len - max(len(prompt_token_ids), len(negative))  # the output follows both
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    _check_reported(params, len(prompt_token_ids), max_tokens)
    base_seed = seed if params.seed is None else int(params.seed)  # numpy's integers end at 64 bits, but seeds do not
    own = named_within(inserted, cache_salt) if inserted else ()
    prompt, stop_ids = tuple(prompt_token_ids), frozenset(params.stop_token_ids or ())
    return [
        Request(
            id=f"{request_id}-{i}",
            prompt_token_ids=prompt,
            params=params,
            seed=base_seed if i == 0 else derive_seed(base_seed, i),
            max_total_tokens=len(prompt_token_ids) + max_tokens,
            stop_ids=stop_ids,
            eos_ids=limits.eos_ids,
            priority=priority,
            cache_salt=cache_salt,
            embeds=embeds,
            inserted=own,
            encoder_ids=encoder_ids,
            whole=heard is not None and heard.rules is not None and heard.rules.aligned is not None,
            sound=None if heard is None else heard.sound,
            speech=None if heard is None else heard.rules,
        )
        for i in range(params.num_drawn)
    ]


def with_spelled_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return `params` with its texts as token ids.

    A negative prompt is encoded as a prompt is, and `bad_words` as they are spelled at the start of a text and after a
    space. Spaces at the beginning of a word make no difference; other white space is part of the word. Raise
    InvalidRequest for a negative prompt without tokens.
    """
    if tokenizer is not None and isinstance(params.negative_prompt, str):
        negative = tokenizer.encode(params.negative_prompt)
        if not negative:
            raise InvalidRequest("the negative prompt is empty; give at least one token.", param="negative_prompt")
        params = params.replace(negative_prompt=negative)
    if tokenizer is None or not any(isinstance(word, str) for word in params.bad_words or ()):
        return params
    spelled: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        if isinstance(word, str):
            bare = word.lstrip(" ") or word
            spellings = [tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        else:
            spellings = [word]
        spelled |= {tuple(map(int, spelling)): None for spelling in spellings if spelling}
    return params.replace(bad_words=[list(word) for word in spelled])


def sampling_overrides(overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return an operator's sampling defaults, under the names of generation_config.json: SAMPLING_DEFAULTS and
    max_new_tokens. Raise InvalidConfig for any other name, and for impossible values."""
    known = (*SAMPLING_DEFAULTS, "max_new_tokens")
    if unknown := sorted(overrides.keys() - {*known}):
        raise InvalidConfig(f"override_generation_config sets {unknown[0]!r}; it may set {', '.join(known)}.")
    found: dict[str, Any] = dict(overrides)
    try:
        SamplingParams(max_tokens=found.get("max_new_tokens"), **{n: v for n, v in found.items() if n != known[-1]})
    except InvalidRequest as error:
        raise InvalidConfig(f"override_generation_config is wrong: {error}") from error
    return found


def derive_seed(seed: int, index: int) -> int:
    """Return an independent 64-bit seed for one of several things that share a seed."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def check_media_width(item: SeenVectors | HeardVectors, width: int, param: str) -> None:
    """Raise InvalidRequest unless a picture's or a sound's vectors have this width; 0: none do."""
    name, own = "image_embeds" if isinstance(item, SeenVectors) else "audio_embeds", item.embeds.width
    if not width:
        message = f"{name} are not taken here; set enable_mm_embeds, for a model that takes them."
        raise InvalidRequest(message, param=param)
    if own != width:
        message = f"{name} has vectors of {own} numbers, and the model's have {width}; give those."
        raise InvalidRequest(message, param=param)


def check_width(width: int, limits: RequestLimits) -> None:
    """Raise InvalidRequest for a prompt's vectors that this model does not take."""
    if not limits.embeds_width:
        raise InvalidRequest(
            "prompt_embeds are not taken here; the operator starts it with --enable-prompt-embeds.",
            param="prompt_embeds",
        )
    if width != limits.embeds_width:
        raise InvalidRequest(
            f"prompt_embeds has vectors of {width} numbers, and the model's have {limits.embeds_width}; give those.",
            param="prompt_embeds",
        )


def most_logprobs(limits: RequestLimits) -> int:
    """Return the most tokens whose logprobs may be reported in one place."""
    most = limits.max_logprobs
    return limits.vocab_size if most == EVERY_LOGPROB else min(most, limits.vocab_size)


def _counted(params: SamplingParams, limits: RequestLimits) -> SamplingParams:
    """Return the parameters with the vocabulary's size for a count of logprobs that means all of it. Raise
    InvalidRequest for a count above the operator's bound."""
    if not params.is_bounded:
        return params
    counts: dict[str, int] = {}
    for param, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        every = asked == EVERY_LOGPROB
        count = limits.vocab_size if every else asked or 0
        if count > limits.max_logprobs != EVERY_LOGPROB:
            meant = f", which asks for all {count} tokens" if every else ""
            raise InvalidRequest(
                f"{param} is {asked}{meant}, and at most {limits.max_logprobs} may be asked for here (max_logprobs).",
                param=param,
            )
        if (asked is not None and count != asked) or count > limits.vocab_size:
            counts[param] = min(count, limits.vocab_size)
    return params.replace(**counts) if counts else params


def _check_reported(params: SamplingParams, prompt: int, output: int) -> None:
    """Raise InvalidRequest for more logprobs than memory should be spent on. The context bounds up to MAX_LOGPROBS
    for each token."""
    for param, count, places in (
        ("logprobs", params.logprobs or 0, output * params.num_drawn),
        ("prompt_logprobs", params.prompt_logprobs or 0, max(prompt - params.prompt_logprobs_start, 0)),
    ):
        if params.is_bounded and count > MAX_LOGPROBS and count * places > MOST_REPORTED:
            less = "max_tokens or n" if param == "logprobs" else "the prompt, from prompt_logprobs_start on"
            raise InvalidRequest(
                f"{param} of {count} tokens in {places} places are more than {MOST_REPORTED}; ask for fewer, or "
                f"shorten {less}.",
                param=param,
            )


def _check_ids(params: SamplingParams, limits: RequestLimits) -> None:
    named: tuple[tuple[str, Collection[int]], ...] = (
        ("logit_bias", params.logit_bias or {}),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("negative_prompt", [] if isinstance(params.negative_prompt, str) else params.negative_prompt or ()),
        *(("bad_words", word) for word in params.bad_words or () if not isinstance(word, str)),
    )
    if any(isinstance(word, str) for word in params.bad_words or ()):
        raise InvalidRequest("bad_words as text need the tokenizer; give lists of token ids.", param="bad_words")
    if isinstance(params.negative_prompt, str):
        raise InvalidRequest(
            "negative_prompt as text needs the tokenizer; give a list of token ids.", param="negative_prompt"
        )
    for param, ids in named:
        wrong = next((i for i in ids if i >= limits.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"{param} names token id {wrong}, outside the vocabulary (0 to {limits.vocab_size - 1}).", param=param
            )
    if len(limits.eos_ids.union(params.stop_token_ids or ())) > MAX_STOP_IDS:
        raise InvalidRequest(f"stop_token_ids and the model's own exceed {MAX_STOP_IDS} ids.", param="stop_token_ids")
