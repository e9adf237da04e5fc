"""The service ridgeline.v1.Inference: generation as a stream of pieces, and the calls that go with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Iterator
from functools import partial

from grpc.aio import ServicerContext as Context

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.grpc.guard import rename, request_id_of
from ridgeline.serving.apis.grpc.messages import (
    chat_fields,
    chat_prompt_fields,
    check_count,
    check_known,
    completion_fields,
    finish_message,
    piece_message,
    prompt_message,
)
from ridgeline.serving.apis.grpc.running import Running
from ridgeline.serving.errors import Aborted, BadRequest
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody, TokenizeChatBody
from ridgeline.serving.requests.validation import (
    chat_request,
    check_model,
    completion_requests,
    detokenized,
    encode,
    parse,
    render,
)
from ridgeline.serving.trace_parent import SANE_ID

MOST_IDS = 1 << 20  # token ids in one Detokenize


class InferenceService:
    """The service ridgeline.v1.Inference. Its methods raise errors that `guard` turns into statuses."""

    def __init__(self, api: ApiServer, running: Running) -> None:
        self._api, self._running = api, running

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        name = _chosen_id(request, context)
        asked = within(await self._asked(request, name), timeout=request.timeout or None, context=context)
        with_breakdown = request.breakdown or self._api.config.request_breakdown
        async with self._api.service.run(asked) as run:
            with self._running.known(run, context):
                events = _chosen if asked.params.num_drawn > asked.params.n else _events
                async for event in events(run, with_breakdown):
                    event.request_id = name
                    yield event

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        api = self._api
        check_model(api, request.model or None)
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await encode(api, request.text, special)
            case "chat":
                body = parse(TokenizeChatBody, chat_prompt_fields(request.chat))
                ids = await encode(api, await render(api, body), request.add_special_tokens, "messages")
            case _:
                raise BadRequest("there is no prompt; set text or chat.", param="prompt")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=api.service.facts().max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        check_model(self._api, request.model or None)
        check_count(request.token_ids, MOST_IDS, "token_ids")
        text = await detokenized(self._api, list(request.token_ids), "token_ids", special=True)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        length = self._api.service.limits().max_model_len
        return pb.ListModelsResponse(models=[pb.Model(id=name, max_model_len=length) for name in self._api.all_names])

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            raise BadRequest("request_id is empty; name the request to end.", param="request_id")
        return pb.AbortResponse(found=self._running.abort(request.request_id, context))

    async def _asked(self, request: pb.GenerateRequest, name: str) -> GenerationRequest:
        api, model = self._api, check_model(self._api, request.model or None)
        if api.config.unknown_fields == "refuse":
            check_known(request)
        match request.WhichOneof("prompt"):
            case None:
                raise BadRequest("there is no prompt; set text, token_ids or chat.", param="prompt")
            case "chat":
                chat = await chat_request(api, parse(ChatBody, chat_fields(request, model)), name)
                return dataclasses.replace(chat, reader=None)  # its clients read the text as the model wrote it
        fields = completion_fields(request, model, api.service.limits().max_model_len)
        [asked] = await completion_requests(api, parse(CompletionBody, fields), name)
        return dataclasses.replace(asked, id=name)


def within(asked: GenerationRequest, *, timeout: float | None, context: Context) -> GenerationRequest:
    """Return the same request, bounded by the earliest of its own timeout, the given one and the call's deadline."""
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise BadRequest(f"timeout must be a number of seconds above 0, got {timeout}.", param="timeout")
    left: float | None = context.time_remaining()
    return asked.within(timeout, None if left is None else max(left, 0.001))


async def _events(run: Run, with_breakdown: bool) -> AsyncIterator[pb.GenerateResponse]:
    """Yield every message about a run: its pieces, and the end of each completion once the engine has told its
    figures."""
    wants_prompt = run.asked.params.prompt_logprobs is not None
    open_ends = {output.index: output for output in run.result.outputs}

    def ends(*, over: bool) -> Iterator[pb.GenerateResponse]:
        for index, output in list(open_ends.items()):
            if over or (output.finished and run.endings[index] is not None):
                del open_ends[index]
                yield pb.GenerateResponse(finish=finish_message(run, output, with_breakdown=with_breakdown))

    try:
        async for piece in run:
            if wants_prompt and piece.output.index == 0 and piece.token_ids:
                wants_prompt = False
                yield pb.GenerateResponse(prompt_logprobs=await _prompt(run))
            if piece.text or piece.token_ids:
                yield pb.GenerateResponse(piece=await _piece(run, piece))
            for end in ends(over=False):
                yield end
    except Aborted:
        pass  # the client of the stream learns of it as a finish reason
    for end in ends(over=True):
        yield end


async def _prompt(run: Run) -> pb.PromptLogprobs:
    return await run.apart(run.entries, partial(prompt_message, run))


async def _piece(run: Run, piece: Piece) -> pb.Piece:
    return await run.apart(run.entries_of(piece), partial(piece_message, piece, run))


async def _chosen(run: Run, with_breakdown: bool) -> AsyncIterator[pb.GenerateResponse]:
    """Yield the messages of a run with best_of: one piece for each completion that is kept, once all have ended."""
    try:
        await run.finish()
        if run.asked.params.prompt_logprobs is not None:
            yield pb.GenerateResponse(prompt_logprobs=await _prompt(run))
    except Aborted:
        run.result.keep_best(run.asked.params)
    for output in run.result.outputs:
        yield pb.GenerateResponse(piece=await _piece(run, Piece(output.text, output.token_ids, output)))
        yield pb.GenerateResponse(finish=finish_message(run, output, with_breakdown=with_breakdown))


def _chosen_id(request: pb.GenerateRequest, context: Context) -> str:
    """Return the call's id. A request may bring an id of its own, which then becomes the call's."""
    if request.request_id:
        if not SANE_ID.fullmatch(request.request_id):
            raise BadRequest(
                f'request_id must be 1 to 128 letters, digits and "-_.:", got {request.request_id[:200]!r}.',
                param="request_id",
            )
        rename(context, request.request_id)
    return request_id_of(context)
