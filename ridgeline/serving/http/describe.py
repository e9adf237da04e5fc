"""The OpenAPI document, completed for routes that check their bodies themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import UNSET
from pydantic import TypeAdapter

from ridgeline.serving.http.answers import Answer, ErrorAnswer, OpenAnswer
from ridgeline.serving.http.middleware import HEALTH, is_admin
from ridgeline.serving.http.paths import is_anthropics, is_kserve, is_ollamas

LINES, BYTES = "application/x-ndjson", "application/octet-stream"
_REF = "#/components/schemas/{name}"
_REASONS = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "An API key, but not the admin's",
    404: "No such model, or nothing of this name",
    408: "The client did not read its stream",
    409: "Run before under this Idempotency-Key, and its answer was not kept",
    413: "The body is too large",
    422: "Another body had this Idempotency-Key",
    429: "The queue is full; see Retry-After",
    500: "The server failed",
    507: "There is no room for another file",
    503: "No engine, or the server is ending; see Retry-After",
    504: "A timeout",
}
_ALWAYS, _WITH_BODY, _GENERATION = (401, 500, 503), (400, 404, 409, 413, 422), (408, 429, 504)
_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
_STREAM = (
    "With stream: server-sent events, each `data: ` and a {chunk} as JSON; at last `data: [DONE]`. A failure on the "
    'way is an event {{"error": …}}; lines that begin with a colon keep the connection alive.'
)
_NAMED = (
    "With stream: server-sent events, each named by the type of its data, a {chunk} as JSON. A failure on the way is "
    "an event, too."
)
_LINES = 'Unless stream is false: lines of JSON, each a {chunk}. A failure on the way is a line {{"error": …}}.'
_HEADERS = [
    ("X-Request-Id", "names the request in logs and in the answer's header; up to 128 letters, digits and any of ._:-"),
    ("Idempotency-Key", "sent again within a minute, the same request gets the same answer"),
]


ERROR = {"content": {"application/json": {"schema": {"$ref": _REF.format(name=ErrorAnswer.__name__)}}}}
Struct = type[msgspec.Struct]


def answers(
    answer: Struct | tuple[Struct, ...], *statuses: int, error: Struct = ErrorAnswer, listed: bool | None = False
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers with this struct, or one of these, or with an error of one of
    these statuses. listed: with a list of it; None: with one or a list."""
    failures: dict[int | str, dict[str, Any]] = {status: _shown(status, error.__name__) for status in statuses}
    shapes = [
        {"$ref": _REF.format(name=each.__name__)} for each in (answer if isinstance(answer, tuple) else (answer,))
    ]
    schema: dict[str, Any] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    if listed is not False:
        several = {"type": "array", "items": schema}
        schema = several if listed else {"anyOf": [schema, several]}
    return {
        200: {"description": "The answer"} | _json(schema),
        **failures,
    }


def described(
    body: Any,
    summary: str,
    answer: Struct | tuple[Struct, ...],
    *,
    chunk: Struct | None = None,
    named: bool = False,
    listed: bool | None = False,
    lines: bool = False,
    error: Struct = ErrorAnswer,
) -> dict[str, Any]:
    """Return the keywords of a route whose body is this model, and whose answer one of these structs. `chunk` is an
    event of its stream, if the route has one, and `named` says that its events have names. `lines`: the stream is lines
    of JSON. `listed` and `error` are as in `answers`."""
    schema = TypeAdapter(body).json_schema(ref_template=_REF.format(name="{model}"))
    parts = schema.pop("$defs", {})
    if isinstance(body, type):
        parts, schema = parts | {body.__name__: schema}, {"$ref": _REF.format(name=body.__name__)}
    responses = answers(answer, *_WITH_BODY, *(_GENERATION if chunk else ()), error=error, listed=listed)
    content = responses[200]["content"]
    if chunk:
        told = _LINES if lines else _NAMED if named else _STREAM
        responses[200]["description"] = told.format(chunk=chunk.__name__)
        content[LINES if lines else "text/event-stream"] = {"schema": {"type": "string"}}
    parameters = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}} for name, text in _HEADERS
    ]
    return {
        "summary": summary,
        "responses": responses,
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "parameters": parameters,
            "x-parts": parts,
        },
    }


def or_bytes(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a route that answers with bytes where the body asks for them."""
    schema = {"type": "string", "format": "binary"}
    keywords["responses"][200]["content"][BYTES] = {"schema": schema}
    return keywords


def describe(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    """Return the document, which is made once. The parts of bodies move to where references look for them."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        # FastAPI's own error shape, which no route here answers with
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if with_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                schemas.update(operation.pop("x-parts", {}))
                _complete(path, operation, with_keys)
                if is_kserve(path):
                    _rename_errors(operation["responses"])
        schemas.update(_schemas())
        app.openapi_schema = document
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    """Return the schemas of all answers. A field whose value is always the same is there too, so it is required."""
    structs = [struct for base in (Answer, OpenAnswer) for struct in _below(base) if msgspec.structs.fields(struct)]
    _, found = msgspec.json.schema_components(structs, ref_template=_REF)
    for struct in structs:
        fields = msgspec.structs.fields(struct)
        found[struct.__name__]["required"] = [field.name for field in fields if field.default is not UNSET]
        for each in found[struct.__name__]["properties"].values():
            each.pop("default", None)
    return found


def _below(struct: Struct) -> Iterator[Struct]:
    """Yield the answers that are made of a struct."""
    for each in struct.__subclasses__():
        yield from (each, *_below(each))


def _complete(path: str, operation: dict[str, Any], with_keys: bool) -> None:
    """Add to an operation what holds for every route."""
    responses = operation["responses"]
    if path in HEALTH:
        responses["503"] = {"description": "Not healthy; see Retry-After", "headers": _RETRY_AFTER}
        return
    error = "AnthropicsErrorAnswer" if is_anthropics(path) else "OllamasError" if is_ollamas(path) else "ErrorAnswer"
    if with_keys:
        operation["security"] = [{"key": []}]
    if "requestBody" not in operation:
        responses.pop("422", None)
        if operation.get("parameters"):
            responses |= {str(status): _shown(status, error) for status in (400, 404)}
    for status in (*_ALWAYS, *((403,) if is_admin(path) else ())):
        responses[str(status)] = _shown(status, error)


def _rename_errors(responses: dict[str, Any]) -> None:
    """Let failures have KServe's shape."""
    for response in responses.values():
        for content in response.get("content", {}).values():
            if content["schema"].get("$ref") == _REF.format(name="ErrorAnswer"):
                content["schema"] = {"$ref": _REF.format(name="KServeFailure")}


def _shown(status: int, error: str) -> dict[str, Any]:
    """Return the description of a failure."""
    headers = {"headers": _RETRY_AFTER} if status in (429, 503) else {}
    return {"description": _REASONS[status], **headers} | _json({"$ref": _REF.format(name=error)})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
