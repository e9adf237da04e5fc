"""Tool calls in the form of Gemma 4, whose arguments are an object with bare names and quotes of its own:

<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.literals import DEEPEST
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
SAID = "call:"
WORD = re.compile(r"[\w.\-]*")
COMMAS = re.compile(r"[\s,]*")
COLON = re.compile(r"[\s:]*")
BARE = re.compile(r"[^,\[\]{}<]*")
WORDS = ("true", "false", "null")


class Gemma4Parser(CallParser):
    """The object is passed on as JSON, part by part as it comes."""

    opens, ends, says = Tags(OPEN), Tags(CLOSE, OPEN), Tags(SAID)
    quotes, brackets, tags = Tags(QUOTE), Tags("{", "["), Tags(OPEN, CLOSE, QUOTE)
    closers: ClassVar = {"{": Tags("}"), "[": Tags("]")}

    def parse(self) -> Reading[None]:
        tag = yield from self.until(self.opens, self.content)
        while tag is not None:
            tag = yield from self._call()
            if tag != OPEN:
                yield from self.space()
                tag = yield from self.until(self.opens, self.content)

    def _call(self) -> Reading[str | None]:
        """Read on from the opening tag of a call to its end, and return the tag there."""
        read = yield from self.space()
        read += (yield from self.expect(self.says)) or ""
        name = yield from self.match(WORD)
        blank = yield from self.space()
        if not name or not read.endswith(SAID) or (yield from self.peek()) != "{":
            rest, tag = yield from self.taken(self.ends)
            self.content(OPEN + read + name + blank + rest + (CLOSE if tag == CLOSE else ""))
            return tag
        self.begin(name)
        if not (yield from self._value(0)):
            return None
        return (yield from self.until(self.ends, Trimmed(self.drop)))

    def _value(self, depth: int) -> Reading[bool]:
        """Give a value as JSON, and return True if it is complete."""
        yield from self.space()
        if (yield from self.expect(self.quotes)) is not None:
            return (yield from self._string())
        if depth < DEEPEST and (bracket := (yield from self.expect(self.brackets))) is not None:
            return (yield from self._items(bracket, depth + 1))
        text = yield from self.match(BARE)
        while (yield from self.peek()) == "<" and not (yield from self.follows(self.tags, 0)):
            text += self.cut(1) + (yield from self.match(BARE))
        complete = bool((yield from self.peek())) and not (self._ended and (yield from self._breaks_off()))
        if complete:
            self.arguments(_as_json(text.strip()))
        return complete

    def _breaks_off(self) -> Reading[bool]:
        """Return True if the text ends within a tag."""
        return (yield from self.peek()) == "<" and not self._text.startswith(self.tags.texts, self._at)

    def _string(self) -> Reading[bool]:
        self.arguments('"')
        escaped = lambda piece: self.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])  # noqa: E731
        if (yield from self.until(self.quotes, escaped, whole=False)) is None:
            return False
        self.arguments('"')
        return True

    def _items(self, bracket: str, depth: int) -> Reading[bool]:
        """Give the items of an object or a list, and return True if it is complete."""
        self.arguments(bracket)
        closer, first = self.closers[bracket], True
        while True:
            yield from self.match(COMMAS)
            if (end := (yield from self.expect(closer))) is not None:
                self.arguments(end)
                return True
            before = self.position
            if not (yield from self.peek()):
                return False
            self.arguments("" if first else ", ")
            first = False
            if bracket == "{":
                key = yield from self._key()
                if not (yield from self.peek()) or (self._ended and (yield from self._breaks_off())):
                    return False
                self.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._value(depth)):
                return False
            if self.position == before:  # a sign that nothing here can be
                self.cut(1)

    def _key(self) -> Reading[str]:
        """Read a name, bare or between quotes, and the colon behind it."""
        if (yield from self.expect(self.quotes)) is not None:
            name, _ = yield from self.taken(self.quotes)
        else:
            name = yield from self.match(WORD)
        yield from self.match(COLON)
        return name


def _as_json(text: str) -> str:
    """Return a bare value as JSON. What is no number or word of JSON becomes a string."""
    try:
        json.loads(text, parse_constant=float.fromhex)
    except (ValueError, RecursionError):
        return text if text in WORDS else json.dumps(text, ensure_ascii=False)
    return text


FORM = ToolForm(
    name="gemma4",
    parser=Gemma4Parser,
    known_by=((OPEN + SAID,), (OPEN, CLOSE)),
    tags=(OPEN, CLOSE, QUOTE),
    opens=(OPEN,),
)
