"""The routes of llama.cpp's server that tell of it: GET /props and /slots; and POST /apply-template and /embedding."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.llamacpp.answers import Applied, Embedded, Properties, Slot
from ridgeline.serving.apis.llamacpp.bodies import ApplyBody, EmbeddingsBody
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.describe import answers, described
from ridgeline.serving.http.exchange import read_body, request_id
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.http.shapes import FINGERPRINT
from ridgeline.serving.http.vectors import entries, vectors_of
from ridgeline.serving.requests.pooling import PoolingBody, inputs, pooling_params
from ridgeline.serving.requests.validation import check_model, parse, render

MOST_SLOTS = 4096  # in one answer


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["llama.cpp"])

    @routes.get("/props", summary="The server's properties", responses=answers(Properties))
    async def props() -> Response:
        facts, special = api.service.facts(), api.tokenizer.special_tokens
        told = Properties(
            default_generation_settings={"n_ctx": facts.max_model_len, "params": dict(api.defaults.sampling)},
            total_slots=facts.max_num_seqs,
            model_alias=api.names[0],
            model_path=facts.model,
            chat_template=api.chat_template.source or "",
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            modalities={"vision": False, "audio": False},
            build_info=FINGERPRINT,
            is_sleeping=bool(api.client.asleep),
        )
        return await json_response(1, lambda: told)

    @routes.get("/slots", summary="The room for requests, and how much is taken", responses=answers(Slot, listed=True))
    async def slots() -> Response:
        facts, stats = api.service.facts(), api.client.stats
        busy = stats.running if stats is not None else 0
        room = range(min(max(facts.max_num_seqs, busy), MOST_SLOTS))
        found = [Slot(id=i, n_ctx=facts.max_model_len, speculative=False, is_processing=i < busy) for i in room]
        return await json_response(len(found), lambda: found)

    @routes.post("/apply-template", **described(ApplyBody, "A conversation as a prompt", Applied))
    async def apply(request: Request) -> Response:
        body = await read_body(request, ApplyBody)
        check_model(api, body.model)
        prompt = await render(api, body)
        return await json_response(1, lambda: Applied(prompt=prompt))

    async def embedding(request: Request) -> Response:
        body = await read_body(request, EmbeddingsBody)
        given = body.input if body.content is None else body.content
        if given is None:
            raise BadRequest("content is required.", param="content")
        asked = parse(PoolingBody, {"input": given} | ({} if body.model is None else {"model": body.model}))
        requests = await inputs(api, asked, pooling_params(asked, None), request_id(request))
        found = await vectors_of(api, request, requests)

        def content() -> list[Embedded]:
            rows = [each.vector if each.vector.ndim == 2 else each.vector[None] for each in found]
            return [Embedded(index=index, embedding=row.tolist()) for index, row in enumerate(rows)]

        return await json_response(entries(found), content)

    for path in ("/embedding", "/embeddings"):
        routes.post(path, **described(EmbeddingsBody, "Texts as vectors", Embedded, listed=True))(embedding)
    return routes
