"""What the OpenAPI document says of routes that check their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

_REF = "#/components/schemas/{model}"
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "what was wrong, and what to do"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field, as a dotted path"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REASONS = {
    400: "The request is wrong",
    401: "No valid API key",
    404: "No such model",
    408: "The client did not read its stream",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "The server failed",
    503: "No engine, or the server is ending; see Retry-After",
    504: "A timeout",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": reason,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
    for status, reason in _REASONS.items()
}
_EVENTS = {
    "schema": {"type": "string"},
    "description": "with stream: server-sent events, each `data: ` and a chunk as JSON; at last `data: [DONE]`. A "
    'failure on the way is an event {"error": …}; lines that begin with a colon keep the connection alive.',
}


def described(body: Any, summary: str, *, streams: bool = False) -> dict[str, Any]:
    """Keywords of a route whose body is that model."""
    schema = TypeAdapter(body).json_schema(ref_template=_REF)
    parts = schema.pop("$defs", {})
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENTS["schema"]}
    description = "The answer" + (f"; {_EVENTS['description']}" if streams else "")
    return {
        "summary": summary,
        "responses": {200: {"description": description, "content": content}, **ERRORS},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "x-parts": parts,
        },
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once. The parts that bodies are made of move to where references look for them."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR_SCHEMA
        for path in document["paths"].values():
            for operation in path.values():
                schemas.update(operation.pop("x-parts", {}))
        app.openapi_schema = document
    return app.openapi_schema
