"""The routes of OpenAI's newer API: POST /v1/responses, and the routes for answers that are kept.

A request is put into a chat's words (response_bodies.py) and runs as chats do (response_answer.py). Answers are kept
unless the client says otherwise, each for its own client (serving/kept/).
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.conversation import Conversation, decoded, fitted
from ridgeline.serving.apis.openai.response_answer import Answer, ResponseNotFound, events
from ridgeline.serving.apis.openai.response_bodies import NAMES, CountBody, ResponsesBody
from ridgeline.serving.apis.openai.response_tools import formats_of, offered
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import answers as answered
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, while_connected
from ridgeline.serving.http.pieces import json_of, json_response
from ridgeline.serving.http.render import shown
from ridgeline.serving.http.sse import NamedEvents
from ridgeline.serving.kept.kept import Found
from ridgeline.serving.requests.custom import hold_inputs
from ridgeline.serving.requests.reading import unread
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import named
from ridgeline.serving.requests.unenforced import unenforced
from ridgeline.serving.requests.validation import chat_length, check_model


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    async def read(request: Request) -> tuple[ResponsesBody, Answer]:
        body = await read_body(request, ResponsesBody)
        name = request_id(request, body.request_id)
        with named(NAMES):
            conversation = await Conversation.of(api, body)
            chat, ignored = await conversation.chat(api, body)
            ignored += await hold_inputs(api, chat, formats_of(offered(body.tools or [], conversation.known)))
            asked = await fitted(api, body, chat, name)
        if body.store and not api.kept.keeps:
            ignored.append("store")
        tell_ignored(request, [*ignored, *unenforced(chat), *unread(api, chat)])
        return body, Answer(api, body, asked, conversation)

    @routes.post(
        "/v1/responses",
        **described(ResponsesBody, "The next answer", answers.ResponseAnswer, chunk=answers.ResponseEvent, named=True),
    )
    async def create(request: Request) -> Response:
        body, answer = await read(request)
        if body.background:
            return await answer.begin()
        if body.stream:
            return NamedEvents(answer.stream)
        with named(NAMES):
            return await while_connected(request.receive, answer.whole())

    @routes.post("/v1/responses/render", **described(ResponsesBody, "A conversation as a prompt", answers.Rendered))
    async def render_response(request: Request) -> Response:
        body, answer = await read(request)
        return await json_response(len(answer.asked.prompt_token_ids), lambda: shown(api, body, answer.asked))

    @routes.post("/v1/responses/input_tokens", **described(CountBody, "The length of the prompt", answers.InputTokens))
    async def count(request: Request) -> Response:
        body = await read_body(request, CountBody)
        with named(NAMES):
            check_model(api, body.model)
            chat, ignored = await (await Conversation.of(api, body)).chat(api, body)
            tokens = answers.InputTokens(input_tokens=await chat_length(api, chat))
        tell_ignored(request, ignored)
        return json_of(tokens)

    @routes.get(
        "/v1/responses/{response_id}", summary="An answer that is kept", responses=answered(answers.ResponseAnswer, 404)
    )
    async def retrieve(
        response_id: str, stream: bool = False, starting_after: int | None = Query(None, ge=0)
    ) -> Response:
        found = _there(await api.kept.find(response_id, owner.tenant()), response_id)
        if not stream:
            if starting_after is not None:
                raise BadRequest("starting_after needs stream to be true.", param="starting_after")
            return Response(found.body, media_type="application/json")
        if not found.streamed:
            raise BadRequest("only an answer made with background and stream can be streamed again.", param="stream")
        start = 0 if starting_after is None else starting_after + 1
        return NamedEvents(events(api, response_id, start))

    @routes.delete("/v1/responses/{response_id}", summary="Forget it", responses=answered(answers.DeletedResponse, 404))
    async def delete(response_id: str) -> Response:
        _there(await api.kept.delete(response_id, owner.tenant()), response_id)
        return json_of(answers.DeletedResponse(id=response_id))

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        summary="End it, if it is written in the background",
        responses=answered(answers.ResponseAnswer, 400, 404),
    )
    async def cancel(response_id: str) -> Response:
        found = _there(await api.kept.cancel(response_id, owner.tenant()), response_id)
        return Response(found.body, media_type="application/json")

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        summary="The items that it was made from",
        responses=answered(answers.ItemList, 404),
    )
    async def items(
        response_id: str,
        limit: int = Query(20, ge=1, le=100),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        found = _there(await api.kept.find(response_id, owner.tenant()), response_id)
        before = found.turns if found.runs else found.turns[:-1]
        listed = await decoded(before)
        if order == "desc":
            listed.reverse()
        if after is not None:
            place = next((place for place, item in enumerate(listed) if item.get("id") == after), None)
            if place is None:
                raise BadRequest(f"after names no item of this answer, got {shortened(after)}.", param="after")
            listed = listed[place + 1 :]
        page = listed[:limit]
        first, last = (page[0].get("id"), page[-1].get("id")) if page else (None, None)
        content = answers.ItemList(data=page, has_more=len(listed) > limit, first_id=first, last_id=last)
        return await json_response(len(page), lambda: content)

    return routes


def _there(found: Found | None, name: str) -> Found:
    if found is None:
        raise ResponseNotFound(
            f"no response {shortened(name)} is kept here: it was never stored, or made room for newer ones.",
            param="response_id",
        )
    return found
