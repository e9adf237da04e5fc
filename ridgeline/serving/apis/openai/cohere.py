"""The route POST /v2/embed, which is Cohere's. Its /v2/rerank stands with those of vLLM and Jina (pooling.py)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from msgspec import UNSET
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pooling import PooledAnswer, PoolingAsked
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.http.vectors import entries, vector_bytes, vectors_of
from ridgeline.serving.requests.bodies import LAX_INT, Body, Object
from ridgeline.serving.requests.pooling import (
    MOST_INPUTS,
    EmbeddingBody,
    EmbeddingChatBody,
    inputs,
    pooling_params,
)
from ridgeline.serving.requests.validation import parse

# What a model's prompts call the use of a text, the likeliest name first
PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
SIDES = {"START": "left", "END": "right"}
MOST_PICTURES = 96  # inputs of a request that has pictures, as in Cohere's API

Form = Literal["float", "binary", "ubinary", "base64", "int8", "uint8"]


class CohereEmbedBody(Body):
    """The body of POST /v2/embed. Texts stand in `texts`, pictures in `images` (URLs, mostly of data), and either in
    the contents of `inputs`. With `truncate` of NONE a text that is too long is refused. `input_type` puts the model's
    prompt for that use before each text. Where an input has a picture, each is a message of the user: nothing is put
    before it, and nothing is cut."""

    model: str | None = None
    texts: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS)] | None = None
    images: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PICTURES)] | None = None
    inputs: Annotated[list[Object], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS)] | None = None
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | None = None
    embedding_types: Annotated[list[Form], Field(max_length=16)] | None = None
    output_dimension: Annotated[int, Field(ge=1), LAX_INT] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), LAX_INT] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), LAX_INT] | None = None


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["pooling"])

    @routes.post("/v2/embed", **described(CohereEmbedBody, "Texts and pictures as vectors", answers.CohereEmbeddings))
    async def embed(request: Request) -> Response:
        body = await read_body(request, CohereEmbedBody)
        forms, contents, name = _forms(body), contents_of(body), request_id(request)
        pictures = sum(part["type"] != "text" for parts in contents for part in parts)
        texts = ["\n".join(part["text"] for part in parts if part["type"] == "text") for parts in contents]
        asked = await (_messages(api, body, contents, name) if pictures else _texts(api, body, texts, name))
        found = await vectors_of(api, request, asked)
        texts = [text for text in texts if text] if pictures else texts
        write = partial(_answer, name, texts, found, forms, pictures=pictures)
        return await json_response(len(forms) * entries(found), write)

    return routes


def contents_of(body: CohereEmbedBody) -> list[list[Any]]:
    """Return the parts of each input of a body. Raise BadRequest for none, or for parts of another type."""
    if sum(given is not None for given in (body.texts, body.images, body.inputs)) != 1:
        raise BadRequest("give either texts, images or inputs.", param="texts")
    if body.images is not None:
        return [[{"type": "image_url", "image_url": {"url": url}}] for url in body.images]
    if body.texts is not None:
        return [[_text_part(text)] for text in body.texts]
    found = []
    for index, each in enumerate(body.inputs or ()):
        parts, path = each.get("content"), f"inputs.{index}.content"
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise BadRequest(f"{path} is a list of parts.", param=path)
        if not all(part.get("type") == "image_url" or isinstance(part.get("text"), str) for part in parts):
            raise BadRequest(f"{path} has parts of text and image_url alone.", param=path)
        found.append([part if part.get("type") == "image_url" else _text_part(part["text"]) for part in parts])
    return found


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def _texts(api: ApiServer, body: CohereEmbedBody, texts: list[str], name: str) -> list[PoolingAsked]:
    asked = parse(EmbeddingBody, _embedding(api, body, texts))
    return await inputs(api, asked, pooling_params(asked, "embed", dimensions=asked.dimensions), name)


async def _messages(
    api: ApiServer, body: CohereEmbedBody, contents: Sequence[list[Any]], name: str
) -> list[PoolingAsked]:
    """Return a request for each input, as a message of the user."""
    if len(contents) > MOST_PICTURES:
        raise BadRequest(
            f"there are {len(contents)} inputs with pictures, of at most {MOST_PICTURES} at once; send fewer.",
            param="inputs",
        )
    common = {"model": body.model, "dimensions": body.output_dimension, "priority": body.priority}
    common = {field: value for field, value in common.items() if value is not None}
    found: list[PoolingAsked] = []
    for index, parts in enumerate(contents):
        chat = parse(EmbeddingChatBody, {**common, "messages": [{"role": "user", "content": parts}]})
        params = pooling_params(chat, "embed", dimensions=chat.dimensions)
        found += await inputs(api, chat, params, f"{name}-{index}")
    return found


def _forms(body: CohereEmbedBody) -> list[Form]:
    """Return the forms of the vectors, each once. Raise BadRequest for those that need a calibration."""
    forms: list[Form] = list(dict.fromkeys(body.embedding_types or ("float",)))
    for form in forms:
        if form in ("int8", "uint8"):
            raise BadRequest(
                f"embedding_types of {form} need ranges that a model was calibrated for; use float, base64 or binary.",
                param="embedding_types",
            )
    return forms


def _embedding(api: ApiServer, body: CohereEmbedBody, texts: list[str]) -> dict[str, Any]:
    """Return the body of an embedding that asks the same."""
    known = api.encoder.prompts if api.service.facts().pooling is not None else {}
    names = PROMPTS.get(body.input_type or "", ())
    side, context = body.truncate or "END", api.service.facts().max_model_len
    most = None if side == "NONE" else -1
    if body.max_tokens is not None and side != "NONE":
        most = min(body.max_tokens, context)
    found = {
        "model": body.model,
        "input": texts,
        "dimensions": body.output_dimension,
        "truncate_prompt_tokens": most,
        "truncation_side": SIDES.get(side),
        "prompt_name": next((name for name in names if name in known), None),
        "priority": body.priority,
    }
    return {name: value for name, value in found.items() if value is not None}


def _answer(
    name: str, texts: list[str], found: Sequence[PooledAnswer], forms: Sequence[Form], pictures: int
) -> answers.CohereEmbeddings:
    by_type: dict[str, list[Any]] = {form: [_written(form, each.vector) for each in found] for form in forms}
    tokens = sum(each.prompt_tokens for each in found)
    return answers.CohereEmbeddings(
        id=name,
        embeddings=by_type,
        texts=texts,
        meta=answers.CohereMeta(
            api_version=answers.CohereVersion(),
            billed_units=answers.CohereUnits(input_tokens=tokens, images=pictures or UNSET),
        ),
    )


def _written(form: Form, vector: np.ndarray) -> Any:
    """Return a vector as numbers, as the base64 of its float32, or as one bit for each positive number: eight in a byte
    from 0, or from -128."""
    if form == "float":
        return vector.tolist()
    if form == "base64":
        return base64.b64encode(vector_bytes(vector, "float32", "<")).decode()
    packed = np.packbits(vector > 0).astype(np.int16)
    return (packed - (128 if form == "binary" else 0)).tolist()
