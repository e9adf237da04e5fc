"""The structure that a body asks of its output, as one grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars.grammar import MOST_DEPTH
from ridgeline.serving.requests.bodies import ChatBody, GenerationBody, StructuredOutputs
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.refusals import depth_above, shortened
from ridgeline.serving.requests.tools import calls_grammar
from ridgeline.transport.messages import Grammar


async def grammar_of(api: ApiServer, body: GenerationBody) -> Grammar | None:
    """Return the grammar that the output must follow, proven to be usable, or None. Raise BadRequest, InvalidRequest or
    Unavailable."""
    param = _param(body)
    if param is None:
        return None
    try:
        grammar = await asyncio.to_thread(_asked_grammar, api, body)  # a schema may be long
        if grammar is not None:
            await api.grammar_checks.check(grammar)
    except InvalidRequest as error:
        raise BadRequest(str(error), param=param) from None
    return grammar


def _param(body: GenerationBody) -> str | None:
    """Return the field that asks for structure, or None if no field does."""
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        return "tools"
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if body.response_format and body.response_format.type != "text" else None


def _asked_grammar(api: ApiServer, body: GenerationBody) -> Grammar | None:
    if isinstance(body, ChatBody) and (calls := calls_grammar(body, api.tokenizer, api.forms)) is not None:
        return calls
    form, structured = body.response_format, body.structured_outputs
    if structured is not None:
        if form is not None and form.type != "text":
            raise BadRequest("give either response_format or structured_outputs, not both.", param="structured_outputs")
        return _structured(structured)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json", text="")
    if form.json_schema is None:
        raise BadRequest(
            "a response_format of type json_schema needs json_schema.", param="response_format.json_schema"
        )
    return _schema(form.json_schema.schema_, "response_format.json_schema.schema")


def _structured(asked: StructuredOutputs) -> Grammar:
    given = [name for name in asked.model_fields_set if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(sorted(name.rstrip("_") for name in given)) or "none"
        raise BadRequest(
            f"structured_outputs takes exactly one of json, regex, choice and grammar, got {names}.",
            param="structured_outputs",
        )
    if asked.json_object:
        return Grammar(kind="json", text="")
    if asked.json_ is not None:
        return _schema(asked.json_, "structured_outputs.json")
    if asked.choice is not None:
        return Grammar(kind="grammar", text=_one_of(asked.choice))
    if asked.regex is not None:
        return Grammar(kind="regex", text=asked.regex)
    return Grammar(kind="grammar", text=asked.grammar or "")


def _one_of(choices: list[str]) -> str:
    """Return one terminal for all choices. Alternatives of a rule would be items of the parser's row, which takes at
    most 2000."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _schema(schema: dict[str, Any] | str, param: str) -> Grammar:
    try:
        value = decode(schema.encode()) if isinstance(schema, str) else schema
    except (BadRequest, UnicodeEncodeError):
        raise BadRequest(f"the JSON schema is not JSON: {shortened(schema)}.", param=param) from None
    if not isinstance(value, dict):
        raise BadRequest(f"a JSON schema is an object, got {shortened(value)}.", param=param)
    if depth_above(value, MOST_DEPTH):
        raise BadRequest(f"the JSON schema is nested more than {MOST_DEPTH} deep; make it flatter.", param=param)
    return Grammar(kind="json", text=msgspec.json.encode(value).decode())
