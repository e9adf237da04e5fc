"""Conversion of prompts to jobs: the requests that run in the engine for each, and the output its caller gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NotRequired, TypedDict

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.embeds import PLACEHOLDER, Inserted
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.sounds import Waveform
from ridgeline.engine.protocol import RunsRequests
from ridgeline.kernels.base.sounds import RATE
from ridgeline.offline.embeds import embeds_of
from ridgeline.offline.media import CallersMedia
from ridgeline.text.arguments import integers, short
from ridgeline.text.completion import Completion
from ridgeline.text.media_prompt import MediaPrompt, expanded, expanded_ids
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.text.requests import Heard, RequestLimits, derive_seed, make_requests, with_spelled_words
from ridgeline.text.sounds import samples_of, waveform
from ridgeline.text.speech.recogniser import SpeechAsk
from ridgeline.text.tokenizer import Tokenizer


class EmbedsPrompt(TypedDict):
    """A prompt as vectors in the place of tokens' embeddings: a tensor or array [tokens, width]."""

    prompt_embeds: Any


class TokensPrompt(TypedDict):
    """A prompt as token ids. It may have a `cache_salt` of its own, and its text as `prompt`."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt as text. It may have a `cache_salt` of its own.

    multi_modal_data: {"image": one picture or a list of them}, each a PIL image, an array [height, width, 3] of uint8,
        a `media.items.Picture`, or the path or bytes of a file; {"video": one video or a list of them}, each an array
        [frames, height, width, 3] of uint8, a list of pictures, (frames, metadata), a `media.items.Clip`, or the path
        or bytes of a file. The prompt has the model's marker in the place of each.
    mm_processor_kwargs: settings of the model's processor, such as `max_pixels`, `fps` or `num_frames`.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class EncoderDecoderPrompt(TypedDict):
    """A prompt that an encoder reads, and another that the decoder's output follows (None: the model's own start). A
    text that the output follows gets no special tokens, since the tokenizer would put an end behind it."""

    encoder_prompt: str | TextPrompt | TokensPrompt
    decoder_prompt: NotRequired[str | TextPrompt | TokensPrompt | None]


SOUNDS = "multi_modal_data"
MOST_THREADS = 8  # that read sounds, pictures and videos
KEYS = {"mm_processor_kwargs", "multi_modal_data", "prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"}
Prompt = str | SpeechAsk | MediaPrompt | TextPrompt | TokensPrompt | EmbedsPrompt | EncoderDecoderPrompt
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a stream: the new part of one completion, and that completion and its request as they stand."""

    text: str
    token_ids: list[int]
    completion: CompletionOutput
    request: RequestOutput


@dataclass(frozen=True)
class Job:
    """One prompt under way: the output to return, the completions that fill it, and the pieces its caller has not taken
    yet."""

    params: SamplingParams
    result: RequestOutput
    completions: list[Completion]
    inbox: deque[StreamOutput]

    @property
    def done(self) -> bool:
        return self.result.finished and not self.inbox


class JobMaker:
    """A maker of jobs, which numbers them. `seed` is used for prompts that bring none. Without a tokenizer prompts are
    token ids. media: the reader of pictures and videos."""

    def __init__(
        self,
        engine: RunsRequests,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        seed: int,
        media: CallersMedia | None = None,
    ) -> None:
        self._engine, self._tokenizer, self.limits, self._seed = engine, tokenizer, limits, seed
        self.media = media or CallersMedia()
        self.count = 0  # the number of the newest job
        self._numbers = count(1)  # which threads may draw at the same time

    def read(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts whose sounds, pictures and videos are read, by several threads: to hash a sound of 30 s alone
        takes milliseconds. Raise InvalidRequest."""
        having = {id(each): each for each in prompts if isinstance(each, Mapping) and each.get(SOUNDS)}
        read = dict(zip(having, _by_threads(self._read, list(having.values())), strict=True))
        return [read.get(id(prompt), prompt) for prompt in prompts]

    def opened(self, conversations: Sequence[Any], options: Mapping[str, Any] | None) -> list[Any]:
        """Return conversations whose media are read so. options: their `mm_processor_kwargs`. Raise InvalidRequest."""
        having = {id(each): each for each in conversations if _has_parts(each)}
        if len(having) < 2:
            return list(conversations)
        processor = self.media.processor(options) if options else None
        opened = _by_threads(lambda messages: self.media.opened(messages, processor), list(having.values()))
        read = dict(zip(having, opened, strict=True))
        return [read.get(id(each), each) for each in conversations]

    def _read(self, prompt: Mapping[str, Any]) -> Prompt:
        given: Any = {"audio": self._waveform(prompt)} if self.limits.stem is not None else None
        if given is None:
            given = self.media.read(prompt[SOUNDS], self.media.processor(prompt.get("mm_processor_kwargs")))
        read: Any = {**prompt, SOUNDS: given}
        return read

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: UsedAdapter | None = None,
    ) -> Job:
        """Return a job that the engine can run. Raise InvalidRequest."""
        limits = self.limits
        if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
            prompt, limits = self._taken_apart(prompt)
        asked: Any = prompt if isinstance(prompt, Mapping) else {}
        heard = Heard(self._waveform(asked)) if limits.stem is not None and not isinstance(prompt, SpeechAsk) else None
        check_keys(asked)
        cache_salt = asked.get("cache_salt") or cache_salt
        if not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, got {short(cache_salt)}.", param="cache_salt")
        embeds = embeds_of(asked["prompt_embeds"]) if "prompt_embeds" in asked else None
        inserted: tuple[Inserted, ...] = ()
        if embeds is not None:
            text, ids = None, [PLACEHOLDER] * len(embeds)
        elif isinstance(prompt, SpeechAsk):
            text, ids, heard = None, list(prompt.prompt), Heard(prompt.sound, prompt.rules)
        elif heard is not None:
            text, ids = self._begun(asked)
        elif isinstance(prompt, MediaPrompt):
            text, ids, inserted = prompt
        elif asked.get("multi_modal_data"):
            text, ids, inserted = self._with_media(asked)
        else:
            text, ids = self.encode(prompt)
        if self._tokenizer is None and params.stop_strings:
            raise InvalidRequest("stop strings need the tokenizer; use stop_token_ids.", param="stop")
        if params.stop_strings and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids.", param="stop")
        number = self.count = next(self._numbers)
        requests = make_requests(
            str(number),
            ids,
            with_spelled_words(params, self._tokenizer),
            limits,
            seed=derive_seed(self._seed, number),
            priority=priority,
            cache_salt=cache_salt,
            embeds=embeds,
            inserted=inserted,
            heard=heard,
        )
        requests = requests if adapter is None else list(map(adapter.of, requests))
        for request in requests:
            self._engine.check(request)
        outputs = [CompletionOutput(index) for index in range(params.num_drawn)]
        result = RequestOutput(str(number), text, ids, outputs)
        completions = [
            Completion(request, output, result, self._tokenizer if params.detokenize else None)
            for request, output in zip(requests, outputs, strict=True)
        ]
        return Job(params, result, completions, deque())

    def _taken_apart(self, prompt: Mapping[str, Any]) -> tuple[Prompt, RequestLimits]:
        """Return the encoder's part of a prompt in two parts, and the limits with the tokens that its decoder's output
        follows. Raise InvalidRequest."""
        own: Any = dict(prompt)
        if self.limits.stem is not None:
            return self._of_sound(own), self.limits
        encoder, decoder = own.pop("encoder_prompt"), own.pop("decoder_prompt", None)
        if own:
            raise InvalidRequest(
                f"a prompt with encoder_prompt may have decoder_prompt besides, got {short(min(own))}.", param="prompt"
            )
        if not self.limits.decoder_start:
            raise InvalidRequest("this model has no encoder; give its prompt alone.", param="encoder_prompt")
        if decoder is None:
            return encoder, self.limits
        if isinstance(decoder, Mapping):
            check_keys(decoder)
        _, ids = self.encode(decoder, add_special_tokens=False)
        if not ids:
            raise InvalidRequest("decoder_prompt is empty; leave it out.", param="decoder_prompt")
        start = self.limits.decoder_start[:1]
        if tuple(ids) == start:
            return encoder, self.limits
        return encoder, replace(self.limits, decoder_start=tuple(ids) if ids[0] in start else (*start, *ids))

    def _with_media(self, prompt: Mapping[str, Any]) -> MediaPrompt:
        """Return a prompt with pictures. Raise InvalidRequest."""
        processor, tokenizer = self.media.processor(prompt.get("mm_processor_kwargs")), self.tokenizer
        ids = prompt.get("prompt_token_ids")
        items = self.media.items_of(prompt["multi_modal_data"], processor)
        if ids is not None:
            return expanded_ids(integers(ids), tokenizer, processor, items)
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidRequest(
                f"a prompt with multi_modal_data has prompt or prompt_token_ids, got {short(text)}.", param="prompt"
            )
        return expanded(text, tokenizer, processor, items)

    def _of_sound(self, own: dict[str, Any]) -> Prompt:
        """Return a prompt in two parts whose first is a sound as one. Raise InvalidRequest."""
        encoder, decoder = own.pop("encoder_prompt"), own.pop("decoder_prompt", None)
        if own or not isinstance(encoder, Mapping) or encoder.get("prompt") or encoder.get("prompt_token_ids"):
            raise InvalidRequest(
                "the encoder of this model reads sounds; give encoder_prompt as {'multi_modal_data': {'audio': "
                "(samples, rate)}}, and decoder_prompt besides.",
                param="encoder_prompt",
            )
        begun = decoder if isinstance(decoder, Mapping) else {} if decoder is None else {"prompt": decoder}
        found: Any = {**begun, **{name: value for name, value in encoder.items() if value}}
        return found

    def _waveform(self, asked: Mapping[str, Any]) -> Waveform:
        """Return the sound of a prompt. Raise InvalidRequest."""
        given, stem = asked.get(SOUNDS), self.limits.stem
        assert stem is not None
        if not isinstance(given, Mapping) or given.keys() != {"audio"}:
            raise InvalidRequest(
                "this model reads sounds; a prompt holds multi_modal_data = {'audio': (samples, rate)}.", param="prompt"
            )
        if isinstance(given["audio"], Waveform):
            return given["audio"]
        samples = samples_of(given["audio"])
        if len(samples) > stem.samples:
            raise InvalidRequest(
                f"audio has {len(samples) / RATE:.1f} s, and this model reads {stem.seconds:g} s at once; use "
                "LLM.transcribe, which cuts it.",
                param="audio",
            )
        return waveform(samples)

    def _begun(self, asked: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """Return the text and the tokens that the output of a recogniser follows."""
        if not asked.get("prompt") and not asked.get("prompt_token_ids"):
            return None, list(self.limits.decoder_start)
        given: Any = {name: asked[name] for name in ("prompt", "prompt_token_ids") if name in asked}
        return self.encode(given, add_special_tokens=False)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids. Raise InvalidRequest."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if isinstance(text, str) and ids is None:
            return text, self.tokenizer.encode(text, add_special_tokens)
        try:
            return text if isinstance(text, str) else None, integers(ids)
        except TypeError:
            raise InvalidRequest(
                f"a prompt is a string or {{'prompt_token_ids': [whole numbers]}}, got {short(prompt)}.", param="prompt"
            ) from None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raise InvalidRequest if there is none."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "this LLM was built with skip_tokenizer_init; give prompts as token ids.", param="prompt"
            )
        return self._tokenizer


def _has_parts(conversation: Any) -> bool:
    messages = conversation if isinstance(conversation, (list, tuple)) else ()
    return any(isinstance(each, Mapping) and isinstance(each.get("content"), list) for each in messages)


def _by_threads(read: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
    """Apply `read` to each in threads, and return the results in order."""
    if len(given) < 2:
        return list(map(read, given))
    with ThreadPoolExecutor(min(len(given), available(), MOST_THREADS), "media") as threads:
        return list(threads.map(read, given))


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for something in a prompt that nothing here reads."""
    for name in sorted(map(str, prompt.keys() - KEYS)):
        if prompt.get(name):
            raise InvalidRequest(
                f"a prompt holds {short(name)}, which is not here; it may hold {', '.join(sorted(KEYS))}.",
                param="prompt",
            )
