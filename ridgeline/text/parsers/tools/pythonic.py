"""Tool calls as a list of Python's calls, which is the whole answer:

[weather(city="Oslo", days=2), time()]

Llama 4 may put <|python_start|> and <|python_end|> around the list.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

START, END = "<|python_start|>", "<|python_end|>"
WORD = re.compile(r"[\w.\-]*")
COMMAS = re.compile(r"[\s,]*")
WORDS = {"true": True, "false": False, "null": None}
MARKS = re.compile(r"""["'\\()\[\]{},]""")


class PythonicParser(CallParser):
    """The names tell calls from other text in brackets: only functions that the request offers are called. An argument
    is given when it is complete."""

    starts, opens, closes = Tags(START), Tags("["), Tags("]")
    ends, parentheses, equals = Tags(END), Tags("("), Tags("=")

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        read += (yield from self.expect(self.starts)) or ""
        read += yield from self.space()
        bracket = yield from self.expect(self.opens)
        wrong = (yield from self.python_calls()) if bracket else ""
        if wrong is not None:
            self.wrong(read + (bracket or ""), wrong, 0)
            return
        yield from self.space()
        yield from self.expect(self.closes)
        yield from self.space()
        yield from self.expect(self.ends)
        yield from self.space()

    def python_calls(self) -> Reading[str | None]:
        """Read calls with commas or lines between them. Return None, or the text of what is none."""
        before = self.calls
        while True:
            read = yield from self.match(COMMAS)
            name = yield from self.match(WORD)
            if not name and self.calls > before:
                return None
            parenthesis = yield from self.expect(self.parentheses)
            if not name or parenthesis is None or (self.tools and name not in self.tools):
                return read + name + (parenthesis or "")
            self.begin(name)
            yield from self._arguments(list(self.tools.get(name, {}).get("properties", {})))

    def _arguments(self, names: list[str]) -> Reading[None]:
        """Read the arguments of a call and the parenthesis behind them. `names` are those of arguments without one."""
        self.arguments("{")
        first = True
        while True:
            yield from self.match(COMMAS)
            if (yield from self.peek()) in (")", ""):
                if self._text:
                    self.cut(1)
                    self.arguments("}")
                return
            word = yield from self.match(WORD)
            equals = yield from self.expect(self.equals)
            text = ("" if equals else word) + (yield from self._literal())
            key = word if equals else names.pop(0) if names else "argument"
            if key in names:
                names.remove(key)
            if not self._text:  # the value may not be whole
                return
            self.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {as_json(text)}")
            first = False

    def _literal(self) -> Reading[str]:
        """Return the text of a value, up to the comma or parenthesis behind it."""
        depth, quote, place = 0, "", 0
        while True:
            while (mark := MARKS.search(self._text, place)) is not None:
                char, place = mark[0], mark.end()
                if char == "\\":
                    if place == len(self._text) and not self._ended:
                        place -= 1  # what it escapes has not come
                        break
                    place += 1
                elif quote:
                    quote = "" if char == quote else quote
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif depth == 0 and char in "),":
                    return self.cut(place - 1)
                elif char in ")]}":
                    depth -= 1
            else:
                place = len(self._text)
            if not (yield from self.more()):
                return self.cut(len(self._text))


def as_json(text: str) -> str:
    """Return a Python literal as JSON. Text that is none becomes a string."""
    bare = text.strip()
    if bare in WORDS:
        return json.dumps(WORDS[bare])
    for read in (json.loads, ast.literal_eval):
        try:
            value: Any = read(bare)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(bare, ensure_ascii=False)


FORM = ToolForm(
    name="pythonic",
    aliases=("llama4_pythonic",),
    parser=PythonicParser,
    known_by=(("[func_name1(params_name1=",), ("[func_name1(param1=",)),
    tags=(START, END),
    opens=(START,),
    frame=Frame(
        start="[", call="$NAME($ARGS)", argument="$KEY=$VALUE", separator=", ", python=True, between=", ", end="]"
    ),
)
