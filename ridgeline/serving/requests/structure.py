"""The structure that a body asks of its output, as one grammar."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars.endless import check_finite
from ridgeline.serving.grammars.grammar import DETAILS, MOST_DEPTH
from ridgeline.serving.grammars.schemas import closed, without_notes
from ridgeline.serving.grammars.tags import to_lark
from ridgeline.serving.requests.bodies import ChatBody, GenerationBody, StructuredOutputs
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.custom import free_calls
from ridgeline.serving.requests.refusals import depth_above, shortened
from ridgeline.serving.requests.tools import calls_grammar
from ridgeline.serving.requests.unenforced import tagged_schemas
from ridgeline.serving.shares import TEXTS
from ridgeline.transport.messages import Grammar

PARAM = "structured_outputs"
FORMS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
OF_SCHEMAS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "coerce_one_of")


async def grammar_of(api: ApiServer, body: GenerationBody) -> Grammar | None:
    """Return the grammar that the output must follow, proven to be usable, or None. Raise BadRequest, InvalidRequest or
    Unavailable."""
    param = _param(body)
    if param is None:
        return None
    try:
        grammar = await TEXTS.run(partial(_asked_grammar, api, body))  # a schema may be long
        if grammar is not None:
            grammar = await api.grammar_checks.check(grammar)
    except InvalidRequest as error:
        raise BadRequest(str(error), param=param) from None
    return grammar


def _param(body: GenerationBody) -> str | None:
    """Return the field that asks for structure, or None if no field does."""
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        return "tools"
    if body.structured_outputs is not None:
        return "structured_outputs"
    if body.response_format and body.response_format.type != "text":
        return "response_format"
    return "tools" if isinstance(body, ChatBody) and body.held else None


def _asked_grammar(api: ApiServer, body: GenerationBody) -> Grammar | None:
    if isinstance(body, ChatBody) and (calls := calls_grammar(body, api.tokenizer, api.forms)) is not None:
        return calls
    form, structured = body.response_format, body.structured_outputs
    if structured is not None:
        if form is not None and form.type != "text":
            raise BadRequest("give either response_format or structured_outputs, not both.", param="structured_outputs")
        return _structured(api, structured)
    if form is None or form.type == "text":
        if isinstance(body, ChatBody) and body.tool_choice != "none":
            return free_calls(body, api.tokenizer, api.forms)
        return None
    if form.type == "json_object":
        return Grammar(kind="json", text="")
    if form.type == "structural_tag":
        asked = form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        return _tagged(api, asked, "response_format")
    if form.json_schema is None:
        raise BadRequest(
            "a response_format of type json_schema needs json_schema.", param="response_format.json_schema"
        )
    return _schema(form.json_schema.schema_, "response_format.json_schema.schema")


def _structured(api: ApiServer, asked: StructuredOutputs) -> Grammar:
    given = [name for name in asked.model_fields_set if name in FORMS and getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(sorted(name.rstrip("_") for name in given)) or "none"
        raise BadRequest(
            f"{PARAM} takes exactly one of json, regex, choice, grammar, json_object and structural_tag, got {names}.",
            param=PARAM,
        )
    if asked.json_ is not None or asked.json_object:
        schema = {"type": "object"} if asked.json_ is None else asked.json_
        return _schema(schema, "structured_outputs.json", asked)
    for name in OF_SCHEMAS:
        if getattr(asked, name) not in (None, False):
            raise BadRequest(f"{name} says more of a JSON schema; give json, or leave it out.", param=f"{PARAM}.{name}")
    if asked.structural_tag is not None:
        return _tagged(api, _read(asked.structural_tag, f"{PARAM}.structural_tag"), f"{PARAM}.structural_tag")
    if asked.choice is not None:
        return Grammar(kind="grammar", text=_one_of(asked.choice))
    if asked.regex is not None:
        return Grammar(kind="regex", text=asked.regex)
    return Grammar(kind="grammar", text=asked.grammar or "")


def _tagged(api: ApiServer, asked: dict[str, Any], param: str) -> Grammar:
    """Return the grammar of a structural tag. It may name the model's special tokens, which have no text."""
    if depth_above(asked, MOST_DEPTH):
        raise BadRequest(f"the structural tag is nested more than {MOST_DEPTH} deep; make it flatter.", param=param)
    for schema in tagged_schemas(asked):
        check_finite(schema, param)
    added, special = api.tokenizer.added, api.tokenizer.special_ids
    try:
        text = to_lark(asked, [name for name, number in added.items() if number in special], DETAILS)
    except InvalidRequest as error:
        raise BadRequest(str(error), param=param) from None
    return Grammar(kind="grammar", text=text)


def _one_of(choices: list[str]) -> str:
    """Return one terminal for all choices. Alternatives of a rule would be items of the parser's row, which takes at
    most 2000."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _schema(schema: dict[str, Any] | str, param: str, more: StructuredOutputs | None = None) -> Grammar:
    value = _read(schema, param)
    if depth_above(value, MOST_DEPTH):
        raise BadRequest(f"the JSON schema is nested more than {MOST_DEPTH} deep; make it flatter.", param=param)
    check_finite(value, param)
    value = without_notes(value)
    if more is not None:
        value = closed(value) if more.disable_additional_properties else value
        value = value | {"x-guidance": _details(more)} if _details(more) else value
    return Grammar(kind="json", text=msgspec.json.encode(value).decode())


def _details(more: StructuredOutputs) -> dict[str, Any]:
    """Return the options for llguidance besides the schema."""
    if more.whitespace_pattern is not None and more.disable_any_whitespace:
        raise BadRequest("give either whitespace_pattern or disable_any_whitespace, not both.", param=PARAM)
    found: dict[str, Any] = {}
    if more.whitespace_pattern is not None:
        found["whitespace_pattern"] = more.whitespace_pattern
    if more.disable_any_whitespace:
        found |= {"whitespace_flexible": False, "whitespace_pattern": None}
    if more.coerce_one_of:
        found["coerce_one_of"] = True
    return found


def _read(text: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Return the JSON object that a client sent as such, or as text."""
    try:
        value = decode(text.encode()) if isinstance(text, str) else text
    except (BadRequest, UnicodeEncodeError):
        what = "structural tag" if param.endswith("structural_tag") else "JSON schema"
        raise BadRequest(f"the {what} is not JSON: {shortened(text)}.", param=param) from None
    if not isinstance(value, dict):
        raise BadRequest(f"a {param.rpartition('.')[2]} is an object, got {shortened(value)}.", param=param)
    return value
