"""Tool calls in the form of Gemma 4, whose arguments are an object with bare names and quotes of its own:

<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.text.parsers.calls import CallParser, Tools, decoded, escaped, no_constant
from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.literals import DEEPEST
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed
from ridgeline.text.parsers.xml import is_named, types_of

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
SAID, SHORT = "call:", ":"  # the model may leave the word out
WORD = re.compile(r"[\w.\-]*")
COMMAS = re.compile(r"[\s,]*")
COLON = re.compile(r"[\s:]*")
BARE = re.compile(r"[^,\[\]{}<]*")
PLAIN = re.compile(r'[^"\\<]*')
WORDS = ("true", "false", "null")


class Gemma4Parser(CallParser):
    """The object is passed on as JSON, part by part as it comes."""

    opened, closed, quote = OPEN, CLOSE, QUOTE

    def __init__(self, tools: Tools | None = None) -> None:
        self.opens, self.ends, self.says = Tags(self.opened), Tags(self.closed, self.opened), Tags(SAID, SHORT)
        self.quotes, self.brackets = Tags(self.quote), Tags("{", "[")
        self.tags = Tags(self.opened, self.closed, self.quote)
        self._schema: Mapping[str, Any] = {}  # of the call that has begun
        super().__init__(tools)

    def parse(self) -> Reading[None]:
        tag = yield from self.until(self.opens, self.content)
        while tag is not None:
            tag = yield from self._call()
            if tag != self.opened:
                yield from self.space()
                tag = yield from self.until(self.opens, self.content)

    def _call(self) -> Reading[str | None]:
        """Read on from the opening tag of a call to its end, and return the tag there."""
        read = yield from self.space()
        read += (yield from self.expect(self.says)) or ""
        name = yield from self.match(WORD)
        blank = yield from self.space()
        if not name or not read.endswith(SHORT) or (yield from self.peek()) != "{":
            self.content(self.opened + read + name + blank)
            tag = yield from self.until(self.ends, self.content)
            self.content(self.closed if tag == self.closed else "")
            return tag
        self.begin(name)
        self._schema = self.tools.get(name, {})
        if not (yield from self._value("")):
            return None
        return (yield from self.until(self.ends, Trimmed(self.drop)))

    def _value(self, inside: str, string: bool = False) -> Reading[bool]:
        """Give a value as JSON, and return True if it is complete. `inside` has the ends of all open brackets. `string`
        says that the schema allows strings alone."""
        yield from self.space()
        if (yield from self.expect(self.quotes)) is not None:
            return (yield from self._string())
        if len(inside) < DEEPEST and (bracket := (yield from self.expect(self.brackets))) is not None:
            return (yield from self._items(bracket, inside))
        text = (yield from self._quoted()) + (yield from self.match(BARE))
        while (yield from self.peek()) == "<" and not (yield from self.follows(self.tags, 0)):
            text += self.cut(1) + (yield from self.match(BARE))
        complete = bool((yield from self.peek())) and not (self._ended and (yield from self._breaks_off()))
        if complete:
            self.arguments(_as_json(text.strip(), string))
        return complete

    def _breaks_off(self) -> Reading[bool]:
        """Return True if the text ends within a tag."""
        return (yield from self.peek()) == "<" and not self._text.startswith(self.tags.texts, self._at)

    def _over(self) -> Reading[bool]:
        """Return True if a tag between calls comes, although brackets are open: the model left their ends out."""
        if (yield from self.peek()) != "<" or not (yield from self.follows(self.ends, 0)):
            return False
        return not (self._ended and (yield from self._breaks_off()))

    def _quoted(self) -> Reading[str]:
        """Take and return a text between JSON's quotes, up to a tag at most; "" if none begins."""
        if (yield from self.peek()) != '"':
            return ""
        parts = [self.cut(1)]
        while True:
            parts.append((yield from self.match(PLAIN)))
            char = yield from self.peek()
            if not char or (char == "<" and (yield from self.follows(self.tags, 0))):
                return "".join(parts)
            parts.append(self.cut(1))
            if char == '"':
                return "".join(parts)
            if char == "\\" and (yield from self.peek()):
                parts.append(self.cut(1))

    def _string(self) -> Reading[bool]:
        self.arguments('"')
        escaped = lambda piece: self.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])  # noqa: E731
        if (yield from self.until(self.quotes, escaped, whole=False)) is None:
            return False
        self.arguments('"')
        return True

    def _items(self, bracket: str, inside: str) -> Reading[bool]:
        """Give the items of an object or a list, and return True if it is complete."""
        self.arguments(bracket)
        end, separator = "}" if bracket == "{" else "]", ""
        while True:
            yield from self.match(COMMAS)
            char = yield from self.peek()
            if char == end:
                self.cut(1)
            if char == end or (char and char in inside) or (yield from self._over()):
                self.arguments(end)
                return True
            before, key, string = self.position, "", False
            if bracket == "{":
                name = yield from self._key()
                string = not inside and is_named(self._schema, name) and types_of(self._schema, name) == {"string"}
                key = json.dumps(name, ensure_ascii=False) + ": "
                if (yield from self._over()):
                    continue
            if not (yield from self.peek()) or (self._ended and (yield from self._breaks_off())):
                return False
            self.arguments(separator + key)
            separator = ", "
            if not (yield from self._value(inside + end, string)):
                return False
            if self.position == before:  # a sign that nothing here can be
                self.cut(1)

    def _key(self) -> Reading[str]:
        """Read a name, bare or between quotes, and the colon behind it."""
        if (yield from self.expect(self.quotes)) is not None:
            name, _ = yield from self.taken(self.quotes)
        elif quoted := (yield from self._quoted()):
            value = decoded(quoted)
            name = value if isinstance(value, str) else quoted
        else:
            name = yield from self.match(WORD)
        yield from self.match(COLON)
        return name


def _as_json(text: str, string: bool) -> str:
    """Return a bare value as JSON. What is no number, word or string of JSON becomes a string, and every value does if
    it must be one."""
    value = decoded(text, no_constant)
    if isinstance(value, str) or (not string and (text in WORDS or value is not None)):
        return escaped(text)
    return json.dumps(text, ensure_ascii=False)


FORM = ToolForm(
    name="gemma4",
    parser=Gemma4Parser,
    known_by=((OPEN + SAID,), (OPEN, CLOSE)),
    tags=(OPEN, CLOSE, QUOTE),
    opens=(OPEN,),
)
