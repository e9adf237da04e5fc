"""The formats and keywords in the JSON schemas of a body that no grammar enforces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars import schemas
from ridgeline.serving.grammars.grammar import MOST_DEPTH
from ridgeline.serving.requests.bodies import ChatBody, GenerationBody
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.refusals import depth_above
from ridgeline.serving.requests.tools import forces_calls, schemas_of, with_allowed_tools

ODD = re.compile(r"[^A-Za-z0-9_.-]")
MOST_NAME = 64  # characters


def unenforced(body: GenerationBody) -> list[str]:
    """Return the entries of the answer's header: `schema.format.regex` for a format, `schema.example` for a keyword. A
    body that will be refused has none."""
    found: dict[str, None] = {}
    for schema in _schemas(body):
        if not depth_above(schema, MOST_DEPTH):
            found |= dict.fromkeys(schemas.unenforced(schema))
    return [f"schema.{ODD.sub('_', name[:MOST_NAME])}" for name in found]


def _schemas(body: GenerationBody) -> Iterator[Any]:
    """Yield the schemas that hold the answer."""
    if isinstance(body, ChatBody) and forces_calls(body):
        try:
            yield from schemas_of(with_allowed_tools(body)).values()
        except BadRequest:
            return
    form, asked = body.response_format, body.structured_outputs
    if form is not None and form.json_schema is not None:
        yield _read(form.json_schema.schema_)
    if form is not None and form.type == "structural_tag":
        yield from tagged_schemas(form.model_dump(include={"format", "structures"}, exclude_none=True))
    if asked is not None and asked.json_ is not None:
        yield _read(asked.json_)
    if asked is not None and asked.structural_tag is not None:
        yield from tagged_schemas(_read(asked.structural_tag))


def tagged_schemas(tag: Any) -> Iterator[Any]:
    """Yield the schemas of a structural tag."""
    if depth_above(tag, MOST_DEPTH):
        return
    parts = [tag]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, Mapping):
            yield from (part[name] for name in ("schema", "json_schema") if name in part)
            parts += [value for name, value in part.items() if name not in ("schema", "json_schema")]


def _read(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return decode(schema.encode())
    except (BadRequest, UnicodeEncodeError):
        return None
