"""The tools that a chat offers, and the calls that it forces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars import schemas
from ridgeline.serving.grammars.endless import check_finite
from ridgeline.serving.grammars.grammar import DETAILS, MOST_DEPTH
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.custom import INPUT, input_rules
from ridgeline.serving.requests.refusals import depth_above, shortened
from ridgeline.text.parsers.arguments import Argument, arguments_of
from ridgeline.text.parsers.choose import Forms
from ridgeline.text.parsers.forms import Frame
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar

MOST_CALLS = 16  # forced calls at once
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MARK = re.compile(r"(\$[A-Z]+)")
INDEX = "/[0-9]{1,2}/"
ANY_TEXT = r"(.|\n)*"


def forces_calls(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def with_allowed_tools(body: ChatBody) -> ChatBody:
    """Return the body with the tools that `tool_choice: {"type": "allowed_tools", …}` leaves, and the mode in its
    place. Raise BadRequest for one that names other tools."""
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    allowed = choice.get("allowed_tools")
    allowed = allowed if isinstance(allowed, dict) else choice
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    names = [_named(tool) for tool in listed] if isinstance(listed, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        wanted = '{"mode": "auto" | "required", "tools": [{"type": "function", "function": {"name": "…"}}]}'
        raise BadRequest(f"allowed_tools takes {wanted}, got {shortened(allowed)}.", param="tool_choice")
    tools = {name: tool for tool in body.tools or [] if (name := _named(tool)) in names}
    missing = next((name for name in names if name not in tools), None)
    if missing is not None:
        raise BadRequest(f"allowed_tools names {missing!r}, which is none of the tools.", param="tool_choice")
    return body.model_copy(update={"tools": list(tools.values()), "tool_choice": mode})


def _named(tool: object) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def schemas_of(body: ChatBody) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments by function name, for the tools that have one."""
    found: dict[str, dict[str, Any]] = {}
    for tool in body.tools or []:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, dict) else {}
    return found


def calls_grammar(body: ChatBody, tokenizer: Tokenizer, forms: Forms) -> Grammar | None:
    """Return the grammar that holds the output to calls in the form that the reader expects, if tool_choice forces any.
    `response_format` is for messages, of which there are none then.

    Raise BadRequest if the calls cannot be forced.
    """
    body = with_allowed_tools(body)
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    functions, most = _functions(body.tools or []), 1 if body.parallel_tool_calls is False else MOST_CALLS
    if isinstance(choice, dict):
        name, most = _chosen(choice), 1
        if name not in functions:
            raise BadRequest(f"tool_choice names {name!r}, which is none of the tools.", param="tool_choice")
        functions = {name: functions[name]}
    elif choice != "required":
        raise BadRequest(
            f"tool_choice may be none, auto, required or a function, got {shortened(choice)}.", param="tool_choice"
        )
    if not functions:
        raise BadRequest("tool_choice is required, and there are no tools; give some.", param="tool_choice")
    if body.structured_outputs is not None:
        raise BadRequest("a forced tool call has a form of its own; leave structured_outputs out.", param="tool_choice")
    form, added = forms.forced(schemas_of(body)), tokenizer.added
    frame = form.newer[1] if form.newer is not None and form.newer[0] in added else form.frame
    assert frame is not None
    tokens = {tag: added[tag] for tag in form.tags if tag in added}
    return Grammar(kind="grammar", text=_lark(functions, most, frame, tokens, body.held))


def _lark(
    functions: dict[str, Any], most: int, frame: Frame, tokens: Mapping[str, int], held: Mapping[str, str]
) -> str:
    """Return the grammar's text. Every function has a rule of its own, so that references within its schema resolve
    there. Tags that are tokens of the model are written as those."""
    start, between, end = (_spelled(text, tokens) for text in (frame.start, frame.between, frame.end))
    calls = "call" if most == 1 else f"call ({between} call){{0,{most - 1}}}"
    lines = [f"start: {start} {calls} {end}", f"call: {' | '.join(f'f{i}' for i in range(len(functions)))}"]
    for i, (name, schema) in enumerate(functions.items()):
        meant = {"$NAME": json.dumps(name), "$QUOTED": json.dumps(json.dumps(name)), "$ARGS": f"a{i}", "$INDEX": INDEX}
        parts = [meant.get(part) or _spelled(part, tokens) for part in MARK.split(frame.call)]
        lines.append(f"f{i}: {' '.join(parts)}")
        if name in held:
            argument = frame.argument.replace("$KEY", INPUT) or f'{{"{INPUT}": $VALUE}}'
            lines += input_rules(f"a{i}", argument, held[name])
            continue
        # No function takes an argument that it does not name, and a weak model would go on making up names.
        schema = schemas.closed_where_plain(schemas.without_notes(schema))
        found = arguments_of(schema, frame.value_end) if frame.argument else None
        lines += [_json(f"a{i}", schema)] if found is None else _one_by_one(f"a{i}", found, frame, tokens)
    return "\n".join(lines)


def _json(rule: str, schema: Mapping[str, Any]) -> str:
    usable = schemas.with_details(schemas.bounded(schemas.known(schema)), DETAILS)
    return f"{rule}: %json {json.dumps(usable)}"


def _one_by_one(rule: str, listed: list[Argument], frame: Frame, tokens: Mapping[str, int]) -> list[str]:
    """Return the rules of arguments in their order, of which some may be missing. The first that is there has no
    separator before it, so there are two rules for the rest behind each place: with one and without."""
    lines, separator = [f"{rule}: {rule}_n0"], _spelled(frame.separator, tokens)
    for k, argument in enumerate(listed):
        one, missing = f"{rule}_{k}", "" if argument.required else f" | {rule}_n{k + 1}"
        lines += [
            *_argument(one, argument, frame, tokens),
            f"{rule}_n{k}: {one} {rule}_s{k + 1}{missing}",
            f"{rule}_s{k}: {separator} {one} {rule}_s{k + 1}{missing and f' | {rule}_s{k + 1}'}",
        ]
    return [*lines, f'{rule}_n{len(listed)}: ""', f'{rule}_s{len(listed)}: ""']


def _argument(rule: str, argument: Argument, frame: Frame, tokens: Mapping[str, int]) -> list[str]:
    before, _, behind = frame.argument.replace("$KEY", argument.name).partition("$VALUE")
    begin, end = _spelled(before, tokens), _spelled(behind, tokens)
    if argument.text:
        tag = frame.value_end or ""
        rest = _spelled(behind.partition(tag)[2], tokens)
        if tag in tokens:
            other = f"/{ANY_TEXT}/ & ~/{ANY_TEXT}{re.escape(tag).replace('/', chr(92) + '/')}{ANY_TEXT}/"
            return [f"{rule}: {begin} {rule.upper()} <[{tokens[tag]}]> {rest}", f"{rule.upper()}: {other}"]
        return [f"{rule}: {begin} {rule}_v {rest}", f"{rule}_v[lazy]: /{ANY_TEXT}/ {json.dumps(tag)}"]
    if argument.choices or argument.truth:
        choices = argument.choices or ("True", "False")
        spelled = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        return [f"{rule}: {begin} ({spelled}) {end}"]
    return [f"{rule}: {begin} {rule}_v {end}", _json(f"{rule}_v", argument.schema or {})]


def _spelled(text: str, tokens: Mapping[str, int]) -> str:
    """Return a fixed text as items of a rule."""
    pattern = "|".join(map(re.escape, tokens))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return " ".join(
        f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False) for part in parts if part
    )


def _functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments by function name. Raise BadRequest for one that cannot be forced."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function, param = tool.get("function"), f"tools.{index}.function"
        if not isinstance(function, dict):
            raise BadRequest(f"{param} must be an object with name and parameters.", param=param)
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise BadRequest(
                f"a function's name is 1 to 64 letters, digits and any of _.-, got {shortened(name)}.",
                param=f"{param}.name",
            )
        if schema is None:
            schema = {"properties": {}, "additionalProperties": False}
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise BadRequest(
                f"parameters are a JSON schema of an object, got {shortened(schema)}.", param=f"{param}.parameters"
            )
        if depth_above(schema, MOST_DEPTH):
            raise BadRequest(
                f"the JSON schema is nested more than {MOST_DEPTH} deep; make it flatter.", param=f"{param}.parameters"
            )
        check_finite(schema, f"{param}.parameters")
        found[name] = {"type": "object"} | schema
    return found


def _chosen(choice: dict[str, Any]) -> object:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        wanted = '{"type": "function", "function": {"name": "…"}}'
        raise BadRequest(f"tool_choice as an object is {wanted}, got {shortened(choice)}.", param="tool_choice")
    return name
