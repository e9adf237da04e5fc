"""The tools of /v1/responses as functions of a chat, and their calls as clients know them.

Besides functions there are functions within namespaces, whose names a chat has in one piece; custom tools, whose input
is one text: a function with one argument; and a search for more tools that the client runs itself. Items of the
conversation may add tools. Tools that OpenAI runs itself are left out by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import MOST_TOOLS, Object
from ridgeline.serving.requests.bounded_json import begun_object
from ridgeline.serving.requests.custom import INPUT
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import text_at, unused
from ridgeline.text.parsers.calls import without_halves

USED = ("type", "name", "description", "parameters")  # of a function; schemas hold where tool_choice forces calls
SEARCH = "tool_search"  # a tool without a name
ADDING = ("additional_tools", "tool_search_output")  # items with tools that the model has from then on
FREE: Object = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class Known(NamedTuple):
    """A function's name and kind as the client knows them. namespace: where it stands, if in one."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom", "search"] = "function"


Offered = list[tuple[str, Object]]  # tools and their paths in the body


def offered(tools: Sequence[Object], items: Sequence[Object]) -> Offered:
    """Return a request's tools: its own, and those that items of the conversation add. Raise BadRequest."""
    found = [(f"tools.{index}", tool) for index, tool in enumerate(tools)]
    for index, item in enumerate(items):
        if item.get("type") in ADDING:
            path = f"input.{index}.tools"
            found += [(f"{path}.{place}", tool) for place, tool in enumerate(_listed(item.get("tools") or [], path))]
    return found


def functions_of(tools: Offered, ignored: list[str]) -> list[Object]:
    """Return the tools as chats have them, and add what is left out to `ignored`. Of two tools with one name the later
    one holds, if an item of the conversation adds it. Raise BadRequest for one without a name."""
    found = dict[str, Object]()
    for path, tool, space in _each(tools):
        kind = tool.get("type")
        if kind == "function":
            ignored += unused([tool], USED)
            schema = tool.get("parameters")
        elif kind == "custom":
            ignored += unused([tool], ("type", "name", "description", "format"))
            schema = _input_of(tool)
        elif _is_search(tool):
            schema = tool.get("parameters")
        elif isinstance(kind, str):
            ignored.append(f"tools.{kind}")
            continue
        else:
            raise BadRequest(f"{path}.type is the kind of a tool, got {shortened(kind)}.", param=path)
        name = _joined(SEARCH if kind == SEARCH else text_at(tool, "name", path), space)
        if name in found and path.startswith("tools."):
            message = f"{path}: there are two tools that the model would know as {shortened(name)}; rename one."
            raise BadRequest(message, param=path)
        more = {"description": tool.get("description"), "parameters": schema}
        function = {"name": name} | {key: value for key, value in more.items() if value is not None}
        found[name] = {"type": "function", "function": function}
    ignored[:] = dict.fromkeys(ignored)
    if len(found) > MOST_TOOLS:
        raise BadRequest(f"there are {len(found)} functions in all namespaces, of at most {MOST_TOOLS}.", param="tools")
    return list(found.values())


def formats_of(tools: Offered) -> dict[str, Object]:
    """Return the grammars of custom tools, by their names in the chat."""
    return {
        _joined(tool["name"], space): form
        for _, tool, space in _each(tools)
        if tool.get("type") == "custom" and (form := _grammar(tool)) is not None
    }


def known_by(tools: Offered) -> dict[str, Known]:
    """Return the names and kinds of functions as the client knows them, by their names in the chat, for those that
    differ."""
    found = {}
    for _, tool, space in _each(tools):
        name, custom = tool.get("name"), tool.get("type") == "custom"
        if _is_search(tool):
            found[_joined(SEARCH, space)] = Known(SEARCH, space, "search")
        elif isinstance(name, str) and (space is not None or custom):
            found[_joined(name, space)] = Known(name, space, "custom" if custom else "function")
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
    text = as_object(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


def as_object(arguments: str) -> Object:
    """Return a call's arguments, or what is there of those that were cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = begun_object(arguments)
    return _whole(found) if isinstance(found, dict) else {}


def _whole(value: Any) -> Any:
    """Return a value of JSON without halves of surrogate pairs."""
    match value:
        case str():
            return without_halves(value)
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {without_halves(key): _whole(each) for key, each in value.items()}
    return value


def found_names(item: Object) -> str:
    """Return the result of a search for tools as the model reads it: names, one on a line."""
    names = [
        _joined(name, space)
        for _, tool, space in _each([("", tool) for tool in item.get("tools") or []])
        if isinstance(name := tool.get("name"), str)
    ]
    return "\n".join(names) or "No tools were found."


def _grammar(tool: Object) -> Object | None:
    form = tool.get("format")
    return form if isinstance(form, dict) and form.get("type") == "grammar" else None


def _input_of(tool: Object) -> Object:
    """Return the schema of a custom tool's argument. The model reads its grammar there."""
    if (form := _grammar(tool)) is None:
        return FREE
    # A bound, although it says nothing, keeps the text within JSON, where its end is clear (text/parsers/arguments.py).
    about = {"description": f"A text by this grammar: {form.get('definition')}", "minLength": 0}
    return FREE | {"properties": {INPUT: {"type": "string"} | about}}


def _is_search(tool: Object) -> bool:
    """Return True for a search that the client runs."""
    return tool.get("type") == SEARCH and tool.get("execution") == "client"


def _listed(tools: object, path: str) -> list[Object]:
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise BadRequest(f"{path} is a list of tools, got {shortened(tools)}.", param=path)
    return tools


def _each(tools: Iterable[tuple[str, Object]]) -> Iterator[tuple[str, Object, str | None]]:
    """Yield every tool with its path and the namespace in which it stands."""
    for path, tool in tools:
        if tool.get("type") != "namespace":
            yield path, tool, None
            continue
        listed, space = _listed(tool.get("tools"), f"{path}.tools"), text_at(tool, "name", path)
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
