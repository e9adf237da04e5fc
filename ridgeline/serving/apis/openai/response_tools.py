"""The tools of /v1/responses as functions of a chat, and their calls as clients know them.

Besides functions there are functions within namespaces, whose names a chat has in one piece, and custom tools, whose
input is one text: a function with one argument. Tools that OpenAI runs itself are left out by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import MOST_TOOLS, Object
from ridgeline.serving.requests.bounded_json import begun_object
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import text_at, unused

USED = ("type", "name", "description", "parameters")  # of a function; schemas hold where tool_choice forces calls
INPUT = "input"  # the argument of a custom tool
FREE = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}


class Known(NamedTuple):
    """A function's name and kind as the client knows them. namespace: where it stands, if in one."""

    name: str
    namespace: str | None = None
    custom: bool = False


def functions_of(tools: Sequence[Object], ignored: list[str]) -> list[Object]:
    """Return the tools as chats have them, and add what is left out to `ignored`. Raise BadRequest for one without a
    name."""
    found, names = list[Object](), set[str]()
    for path, tool, space in _each(tools):
        kind = tool.get("type")
        if kind == "function":
            ignored += unused([tool], USED)
            schema = tool.get("parameters")
        elif kind == "custom":
            ignored += unused([tool], ("type", "name", "description"))
            schema = FREE
        elif isinstance(kind, str):
            ignored.append(f"tools.{kind}")
            continue
        else:
            raise BadRequest(f"{path}.type is the kind of a tool, got {shortened(kind)}.", param=path)
        function = {"name": _joined(text_at(tool, "name", path), space)}
        if function["name"] in names:
            message = (
                f"{path}: there are two tools that the model would know as {shortened(function['name'])}; rename one."
            )
            raise BadRequest(message, param=path)
        names.add(function["name"])
        more = {"description": tool.get("description"), "parameters": schema}
        function |= {name: value for name, value in more.items() if value is not None}
        found.append({"type": "function", "function": function})
    ignored[:] = dict.fromkeys(ignored)
    if len(found) > MOST_TOOLS:
        raise BadRequest(f"there are {len(found)} functions in all namespaces, of at most {MOST_TOOLS}.", param="tools")
    return found


def known_by(tools: Iterable[Object]) -> dict[str, Known]:
    """Return the names and kinds of functions as the client knows them, by their names in the chat, for those that
    differ."""
    found = {}
    for _, tool, space in _each(tools):
        name, custom = tool.get("name"), tool.get("type") == "custom"
        if isinstance(name, str) and (space is not None or custom):
            found[_joined(name, space)] = Known(name, space, custom)
    return found


def choice_of(choice: str | Object | None, ignored: list[str]) -> str | Object | None:
    """Return tool_choice as chats have it. A tool that is left out cannot be chosen, so that the model may."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        if not isinstance(listed, list):
            return choice
        names = [_chosen(each) for each in listed]
        kept = [{"type": "function", "function": {"name": name}} for name in names if name]
        if listed and not kept:
            ignored.append("tool_choice")
            return "none"
        return choice | {"tools": kept}
    if (name := _chosen(choice)) is not None:
        return {"type": "function", "function": {"name": name}}
    if choice.get("type") in ("function", "custom") or not isinstance(choice.get("type"), str):
        wanted = 'none, auto, required, {"type": "function", "name": "…"} or {"type": "allowed_tools", …}'
        raise BadRequest(f"tool_choice is {wanted}, got {shortened(choice)}.", param="tool_choice")
    ignored.append("tool_choice")
    return None


def called_name(item: Mapping[str, Any], path: str) -> str:
    """Return the name in the chat of the function that an item calls. Raise BadRequest without one."""
    space = item.get("namespace")
    return _joined(text_at(item, "name", path), space if isinstance(space, str) else None)


def as_arguments(text: str) -> str:
    """Return the input of a custom tool as the arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """Return the text that a custom tool is given by a call's arguments, or what is there of one that was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = begun_object(arguments)
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _each(tools: Iterable[Object]) -> Iterable[tuple[str, Object, str | None]]:
    """Yield every tool with its path and the namespace in which it stands."""
    for index, tool in enumerate(tools):
        path, listed = f"tools.{index}", tool.get("tools")
        if tool.get("type") != "namespace":
            yield path, tool, None
            continue
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise BadRequest(f"{path}.tools is a list of tools, got {shortened(listed)}.", param=f"{path}.tools")
        space = text_at(tool, "name", path)
        for place, each in enumerate(listed):
            yield f"{path}.tools.{place}", each, space


def _joined(name: str, space: str | None) -> str:
    if space is None:
        return name
    return space + name if space.endswith(("_", ".", "-")) else f"{space}__{name}"


def _chosen(choice: object) -> str | None:
    """Return the name in the chat of a function that is chosen."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return None
    space = choice.get("namespace")
    name = choice.get("name")
    return _joined(name, space if isinstance(space, str) else None) if isinstance(name, str) else None
