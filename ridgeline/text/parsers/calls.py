"""The part that parsers of tool calls share: calls as they are found, and calls that are written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.text.parsers.events import CallDelta
from ridgeline.text.parsers.scanner import Give, Reading, Scanner, Tags

Tools = Mapping[str, Mapping[str, Any]]  # a function's name → the JSON schema of its arguments

# Everything up to an object of arguments. It has no "<", so that it never reaches beyond a tag.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\<]|\\[^<])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
WRAPPER = "arguments"  # around which some models put all arguments once more
MARKS = re.compile(r'["\\{}\[\]<]')
WITHIN = re.compile(r'["\\\x00-\x1f]')  # what matters to a string, control characters among it
HALF = re.compile("[\ud800-\udfff]")
SEPARATORS = re.compile(r"[\s,]*")
LIST, LIST_END = Tags("["), Tags("]")


class JsonSpan:
    """The place within a JSON object or list that comes in pieces.

    inner: stop once, before the first object within.
    """

    def __init__(self, *, inner: bool = False) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self._inner = inner

    def end(self, text: str, start: int = 0) -> tuple[int, bool]:
        """Return the end of the value's part of the text, and True if the value ends there.

        Outside of strings JSON has no "<", so a broken value ends at the next tag at the latest.
        """
        place = start
        if self._escaped and place < len(text):
            self._escaped, place = False, place + 1
        while (mark := MARKS.search(text, place)) is not None:
            char, place = mark[0], mark.end()
            if self._quoted:
                self._quoted = char != '"'
                if char == "\\":
                    self._escaped = place == len(text)
                    place += 1
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                if self._inner and self._depth == 1:
                    self._inner = False
                    if char == "{":
                        return place - 1, False
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place, True
            elif char == "<":
                return place - 1, True
        return len(text), False


class Escaping:
    """A giver of JSON that escapes control characters within its strings. Some models write them as they are, and JSON
    has none."""

    def __init__(self, give: Give) -> None:
        self._give, self._quoted, self._escaped = give, False, False

    def __call__(self, text: str) -> None:
        parts, done, place = list[str](), 0, 0
        if self._escaped and text:
            self._escaped, place = False, 1
            if text[0] < " ":
                parts.append(_escape(text[0])[1:])  # the backslash before it is there
                done = 1
        while (mark := WITHIN.search(text, place)) is not None:
            char, place = mark[0], mark.end()
            if char == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                continue
            elif char == "\\":
                self._escaped = place == len(text)
                if text[place : place + 1] < " " and not self._escaped:
                    parts += text[done:place], _escape(text[place])[1:]
                    done = place + 1
                place += 1
            else:
                parts += text[done : place - 1], _escape(char)
                done = place
        self._give("".join((*parts, text[done:])) if parts else text)


def escaped(text: str) -> str:
    """Return a whole text of JSON with control characters escaped within its strings."""
    parts: list[str] = []
    Escaping(parts.append)(text)
    return "".join(parts)


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


class CallParser(Scanner):
    """The base of parsers of calls. `calls` counts those that have begun.

    head: what a call written as JSON has before its arguments, with the name's text as its first group. It has no "<".
    skips: objects in a list that are no calls are passed over if others are.
    """

    head, skips = HEAD, False

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__()
        self.tools = tools or {}
        self.calls = 0

    def wrong(self, opened: str, text: str, before: int) -> None:
        """Give what proved to be no call as content, with what opened it unless a call has come behind that. `before`
        counts the calls until then."""
        self.content(text if self.calls > before else opened + text)

    def offers(self, name: str) -> bool:
        """Return True if a JSON object with this name is a call."""
        return True

    def begin(self, name: str, call_id: str | None = None) -> None:
        self.calls += 1
        self.emit(CallDelta(self.calls - 1, without_halves(name), id=call_id and without_halves(call_id)))

    def arguments(self, text: str) -> None:
        if text:
            self.emit(CallDelta(self.calls - 1, arguments=without_halves(text)))

    def wraps(self, name: str) -> bool:
        """Return True if an argument `arguments` of a function can only be an object around all of them: the request
        has the function, which has no argument of this name."""
        properties = self.tools.get(name, {}).get("properties")
        return isinstance(properties, Mapping) and WRAPPER not in properties

    def json_value(self, give: Give, begun: str = "") -> Reading[bool]:
        """Give a JSON object or list as it comes, and return True if it is complete. `begun` is the part that has been
        taken already."""
        span, give = JsonSpan(), Escaping(give)
        if begun:
            span.end(begun)
            give(begun)
        while True:
            end, complete = span.end(self._text, self._at)
            if end > self._at:
                give(self.cut(end - self._at))
            if complete:
                return True
            if not (yield from self.more()):
                return False

    def json_arguments(self) -> Reading[None]:
        """Read the object of arguments of the call that has begun. Without one the call has none."""
        yield from self.space()
        if (yield from self.peek()) == "{":
            yield from self.json_value(self.arguments)
        else:
            self.arguments("{}")

    def json_call(self, begun: str = "") -> Reading[str | None]:
        """Read {"name": …, "arguments": {…}}. Return None, or the text that was read if it is no call. `begun` is the
        part that has been taken already.

        Arguments are given as they come where the name stands before them, and otherwise when the object has ended.
        """
        read, span = [begun], JsonSpan(inner=True)
        span.end(begun)
        while True:
            end, complete = span.end(self._text, self._at)
            read.append(self.cut(end - self._at))
            if self.left and not complete:  # before the first object within, and only there arguments can begin
                head = self.head.fullmatch("".join(read))
                name = decoded(head[1]) if head else None
                if isinstance(name, str) and self.offers(name):
                    self.begin(name)
                    yield from self.json_value(self.arguments)
                    yield from self.space()
                    yield from self.rest_of_call()
                    return None
            elif complete or self._ended:
                text = "".join(read)
                return None if self.whole_call(text) else text
            else:
                yield

    def rest_of_call(self) -> Reading[None]:
        """Read on from the end of a call's arguments to the end of its object, which may say more, such as an id."""
        if (yield from self.peek()) in ("}", ","):
            span = JsonSpan()
            while True:
                end, complete = span.end(self._text, self._at)
                self.cut(end - self._at)
                if complete or self._ended:
                    return
                yield

    def whole_call(self, text: str) -> bool:
        """Give a call that is written in full, in whatever order. Return False if it is none."""
        value = decoded(text, str)
        if not isinstance(value, dict):
            return False
        name, arguments = self.parts(value)
        if isinstance(arguments, str):  # it may be a text of JSON already
            arguments = decoded(arguments, str) if arguments.strip() not in ("", "null") else {}
        elif arguments is None:
            arguments = {}
        if not isinstance(name, str) or not isinstance(arguments, dict) or not self.offers(name):
            return False
        found = value.get("id")
        self.begin(name, found if isinstance(found, str) and found else None)
        self.arguments(json.dumps(arguments, ensure_ascii=False))
        return True

    def parts(self, call: dict[str, Any]) -> tuple[object, object]:
        """Return the name and the arguments of an object; a name that is no text if it is no call."""
        return call.get("name"), call.get("arguments", call.get("parameters", {}))

    def json_calls(self) -> Reading[str | None]:
        """Read one call or a list of calls. Return None, or the text of what is none."""
        yield from self.space()
        if (yield from self.expect(LIST)) is None:
            return (yield from self.json_call()) if (yield from self.peek()) == "{" else ""
        return (yield from self.json_list())

    def json_list(self) -> Reading[str | None]:
        """Read a list of calls behind its bracket. Return None, or the text of what is none."""
        before, read = self.calls, "["  # what was read since the last call
        while True:
            read += yield from self.match(SEPARATORS)
            if (yield from self.peek()) != "{":
                read += (yield from self.expect(LIST_END)) or ""
                return None if self.calls > before else read
            broken = yield from self.json_call()
            if broken is not None and not self.skips:
                return read + broken
            read = "" if broken is None else read + broken


def unwrapped(text: str) -> str:
    """Return the arguments in the JSON text of an object that holds nothing but `arguments`; other texts as they are.
    The arguments may be an object, or a text of one."""
    value = decoded(text, no_constant)
    if not isinstance(value, dict) or value.keys() != {WRAPPER}:
        return text
    inner = value[WRAPPER]
    inner = decoded(inner, no_constant) if isinstance(inner, str) else inner
    return json.dumps(inner, ensure_ascii=False) if isinstance(inner, dict) else text


def without_halves(text: str) -> str:
    """Return a text whose halves of surrogate pairs, which JSON can spell and UTF-8 cannot hold, are replaced."""
    return text if text.isascii() else HALF.sub("\ufffd", text)


def decoded(text: str, constant: Callable[[str], object] | None = None) -> object:
    """Return the value of a JSON text, in whose strings control characters may stand as they are; None if it is no
    JSON. `constant` makes the values of NaN and Infinity, which are numbers otherwise."""
    try:
        return json.loads(text, strict=False, parse_constant=constant)
    except (ValueError, RecursionError):
        return None


def no_constant(text: str) -> object:
    """Refuse NaN and Infinity, which JSON has not."""
    raise ValueError(f"{text} is no JSON")
