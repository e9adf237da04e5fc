"""The tools that a chat offers, and the calls that it forces."""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.core.serving import ServeConfig
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.grammars.grammar import MOST_DEPTH, WHITESPACE
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.refusals import depth_above, shortened
from ridgeline.text.parsers.tools.hermes import CLOSE, OPEN
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar

MOST_CALLS = 16  # forced calls at once
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def forces_calls(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def reads_calls(config: ServeConfig, body: ChatBody) -> bool:
    """Return True if the answer may hold calls to look for: they are forced, or the model's form of them is known."""
    return forces_calls(body) or (bool(body.tools) and body.tool_choice != "none" and config.tool_call_parser != "none")


def calls_grammar(body: ChatBody, tokenizer: Tokenizer) -> Grammar | None:
    """Return the grammar that holds the output to calls in the form that `HermesParser` reads, if tool_choice forces
    any.

    Raise BadRequest if the calls cannot be forced.
    """
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
    if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
        raise BadRequest("a forced tool call has a form of its own; leave other structure out.", param="tool_choice")
    return Grammar(kind="grammar", text=_lark(functions, most, _tags(tokenizer)))


def _lark(functions: dict[str, Any], most: int, tags: tuple[str, str]) -> str:
    """Return the grammar's text. Every function has a rule of its own, so that references within its schema resolve
    there."""
    lines = [
        "start: call" if most == 1 else f'start: call ("\\n" call){{0,{most - 1}}}',
        f'call: {tags[0]} "\\n" ({" | ".join(f"f{i}" for i in range(len(functions)))}) "\\n" {tags[1]}',
    ]
    for i, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines += [f'f{i}: {head} a{i} "}}"', f"a{i}: %json {json.dumps(schema | {'x-guidance': WHITESPACE})}"]
    return "\n".join(lines)


def _tags(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the tags as a grammar names them: as tokens if the model has such tokens that show in its text, and else
    spelled out."""
    ids = [tokenizer.backend.token_to_id(tag) for tag in (OPEN, CLOSE)]
    own = all(token_id is not None and token_id not in tokenizer.special_ids for token_id in ids)
    return (OPEN, CLOSE) if own else (json.dumps(OPEN), json.dumps(CLOSE))


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
        found[name] = {"type": "object"} | schema
    return found


def _chosen(choice: dict[str, Any]) -> object:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        wanted = '{"type": "function", "function": {"name": "…"}}'
        raise BadRequest(f"tool_choice as an object is {wanted}, got {shortened(choice)}.", param="tool_choice")
    return name
