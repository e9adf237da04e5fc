"""The routes POST /v1/audio/transcriptions and /v1/audio/translations: what is said in a file of sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import ceil
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from msgspec import UNSET
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.sounds import RATE
from ridgeline.media.pool import NoMemory
from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, Unavailable
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import answers as answers_of
from ridgeline.serving.http.exchange import request_id, together, while_connected
from ridgeline.serving.http.multipart import Form, read_form
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.http.sse import EventStream, Write
from ridgeline.serving.requests.audio import TranscriptionBody, TranslationBody, body_of
from ridgeline.serving.requests.validation import check_model
from ridgeline.text.outputs import RequestOutput
from ridgeline.text.requests import Heard
from ridgeline.text.speech.answers import answer_of
from ridgeline.text.speech.formats import FORMATS
from ridgeline.text.speech.languages import LANGUAGES
from ridgeline.text.speech.recogniser import Recogniser, SpeechAnswer, SpeechAsk, SpokenText
from ridgeline.text.speech.segments import SpokenSegment
from ridgeline.text.speech.tokens import SpeechTokens
from ridgeline.weights.formats.json_file import read_json

Task = Literal["transcribe", "translate"]
FAILURES = (400, 404, 408, 413, 429, 504)


def form_schema(model: type[TranslationBody]) -> dict[str, Any]:
    """Return the body of a route in the OpenAPI document."""
    schema = TypeAdapter(model).json_schema()
    properties = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    form = {"type": "object", "required": ["file"], "properties": properties}
    return {"required": True, "content": {"multipart/form-data": {"schema": form}}}


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["audio"])

    def described(model: type[TranslationBody], summary: str) -> dict[str, Any]:
        responses = answers_of((answers.Transcription, answers.VerboseTranscription), *FAILURES)
        return {"summary": summary, "responses": responses, "openapi_extra": {"requestBody": form_schema(model)}}

    @routes.post("/v1/audio/transcriptions", **described(TranscriptionBody, "What is said in a sound"))
    async def transcriptions(request: Request) -> Response:
        return await _answer(api, request, TranscriptionBody, "transcribe")

    @routes.post("/v1/audio/translations", **described(TranslationBody, "What is said in a sound, in English"))
    async def translations(request: Request) -> Response:
        return await _answer(api, request, TranslationBody, "translate")

    return routes


async def _answer(api: ApiServer, request: Request, model: type[TranslationBody], task: Task) -> Response:
    name, recogniser = request_id(request), recogniser_of(api)
    form, data = await _received(api, request)
    body = body_of(form.listed, model)
    served = check_model(api, body.model)
    samples_N = await asyncio.to_thread(_decoded, api, data, owner.current())
    del data
    run = SoundAnswer(api, recogniser, samples_N, body, name, task)
    if body.stream:
        return EventStream(run.stream)
    return await while_connected(request.receive, run.whole(served))


def recogniser_of(api: ApiServer) -> Recogniser:
    """Return a recogniser with this server's model. Raise BadRequest if that hears nothing."""
    limits = api.service.limits()
    if limits.stem is None:
        raise BadRequest(f"the model {api.names[0]} reads text, not sound; ask another one.", param="model")
    try:
        tokens = SpeechTokens.of(api.tokenizer, read_json(api.folder / "generation_config.json"))
    except ModelLoadError as error:
        raise BadRequest(str(error), param="model") from error
    return Recogniser(api.tokenizer, tokens, limits.stem, limits.max_model_len)


async def _received(api: ApiServer, request: Request) -> tuple[Form, bytes]:
    """Read the form. Raise BadRequest for one without a file, or with a longer one than is read."""
    held, most = bytearray(), api.config.audio_file_bytes

    async def take(piece: bytes) -> None:
        held.extend(piece)
        if len(held) > most:
            raise BadRequest(f"the file is longer than {most} bytes (--audio-file-bytes); send less.", param="file")

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in request.stream():
            if piece:
                yield piece

    form = await read_form(request.headers.get("content-type", ""), pieces(), "file", take)
    if form.filename is None:
        raise BadRequest("the form has no file.", param="file")
    return form, bytes(held)


def _decoded(api: ApiServer, data: bytes, mine: str) -> np.ndarray:
    """Return a file's samples. Raise BadMedia, Unavailable."""
    try:
        return api.sounds.sound(data, rate=RATE, owner=mine).samples_N
    except NoMemory as error:
        raise Unavailable("there is no memory for another sound now; try again soon.", retry_after=5) from error


class SoundAnswer:
    """One file under way. Each of its windows runs as a request of the same client."""

    def __init__(
        self,
        api: ApiServer,
        recogniser: Recogniser,
        samples_N: np.ndarray,
        body: TranslationBody,
        name: str,
        task: Task,
    ) -> None:
        self._api, self._body, self._name, self._task = api, body, name, task
        self._found, self._count = SpokenText("", len(samples_N) / RATE), 0
        self._options = body.options(task)
        self._asking = recogniser.recognise(samples_N, self._options, self._found)

    async def segments(self) -> AsyncIterator[SpokenSegment]:
        """Yield the segments as they come."""
        told, given = 0, list[SpeechAnswer]()
        while True:
            asks = await asyncio.to_thread(self._next, given)  # it hashes and cuts samples
            for segment in self._found.segments[told:]:
                yield segment
            told = len(self._found.segments)
            if asks is None:
                return
            results = await together([self._run(ask) for ask in asks])
            given = [answer_of(ask, result) for ask, result in zip(asks, results, strict=True)]

    def _next(self, given: list[SpeechAnswer]) -> list[SpeechAsk] | None:
        try:
            return self._asking.send(given) if given else next(self._asking)
        except StopIteration:
            return None

    async def _run(self, ask: SpeechAsk) -> RequestOutput:
        config = self._api.config
        self._count += 1
        asked = GenerationRequest(
            id=f"{self._name}-{self._count}",
            prompt_token_ids=list(ask.prompt),
            params=ask.params,
            heard=Heard(ask.sound, ask.rules),
            timeout=config.request_timeout,
            queue_timeout=config.queue_timeout,
        )
        run = self._api.service.run(asked)
        async with run:
            return await run.finish()

    async def whole(self, model: str) -> Response:
        async for _ in self.segments():
            pass
        found, form = self._found, self._body.response_format or "json"
        if form in FORMATS:
            return PlainTextResponse(FORMATS[form](found.segments))
        usage = self._usage()
        if form == "json":
            return await json_response(1, lambda: answers.Transcription(text=found.text, usage=usage))
        return await json_response(
            len(found.segments),
            lambda: answers.VerboseTranscription(
                task=self._task,
                language=LANGUAGES.get(found.language, found.language),
                duration=found.seconds,
                text=found.text,
                segments=[_shown(each) for each in found.segments],
                words=_words(found) if self._options.word_timestamps else UNSET,
                usage=usage,
            ),
        )

    async def stream(self, write: Write) -> None:
        """Write each segment as a delta: a window that is decoded again must not be told twice."""
        first = True
        async for segment in self.segments():
            text = segment.text.lstrip() if first else segment.text
            first = False
            await write(answers.TranscriptDelta(type="transcript.text.delta", delta=text))
        done = answers.TranscriptDone(type="transcript.text.done", text=self._found.text, usage=self._usage())
        await write(done)

    def _usage(self) -> answers.TranscriptUsage:
        return answers.TranscriptUsage(type="duration", seconds=ceil(self._found.seconds))


def _words(found: SpokenText) -> list[answers.TranscriptWord]:
    words = (word for segment in found.segments for word in segment.words)
    return [answers.TranscriptWord(word=each.word, start=each.start, end=each.end) for each in words]


def _shown(segment: SpokenSegment) -> answers.TranscriptSegment:
    names = ("id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio")
    known = {name: getattr(segment, name) for name in names}
    return answers.TranscriptSegment(**known, no_speech_prob=segment.no_speech_prob)
