"""Tool calls as a list of Python's calls, which is the whole answer:

[weather(city="Oslo", days=2), time()]

Llama 4 may put <|python_start|> and <|python_end|> around the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.literals import python_literal
from ridgeline.text.parsers.scanner import MOST_SPACE, Reading, Tags

START, END = "<|python_start|>", "<|python_end|>"
WORD = re.compile(r"[\w.\-]*")
COMMAS = re.compile(r"[\s,]*")
SOME_SPACE, SOME_WORD = re.compile(rf"\s{{0,{MOST_SPACE}}}"), re.compile(rf"[\w.\-]{{0,{MOST_SPACE}}}")
WORDS = {"true": True, "false": False, "null": None}
MARKS = re.compile(r"""["'\\()\[\]{},]""")
STRING = re.compile(r"""\\.|'(?:\\.|[^'\\])*+'|"(?:\\.|[^"\\])*+\"""", re.DOTALL)
RAW = re.compile(r"\\.|[\n\r\0]", re.DOTALL)  # what a string between single quotes may not hold, unless it is escaped
QUOTED = re.compile(r"""\\.|["']""", re.DOTALL)
ZEROS, SET = re.compile(r"-?0[0-9]+"), re.compile(r"\{.+\}\Z", re.DOTALL)


class PythonicParser(CallParser):
    """The names tell calls from other text in brackets: only functions that the request offers are called. An argument
    is given when it is complete."""

    starts, opens, closes = Tags(START), Tags("["), Tags("]")
    ends, parentheses, equals = Tags(END), Tags("("), Tags("=")
    marked = False  # tags of their own say that all is meant as calls

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
            properties = self.tools.get(name, {}).get("properties")
            yield from self._arguments(properties if isinstance(properties, Mapping) else ())

    def _arguments(self, names: Iterable[str]) -> Reading[None]:
        """Read the arguments of a call and the parenthesis behind them. `names` are those of arguments without one."""
        self.arguments("{")
        first, used = True, set[str]()
        free = (name for name in names if name not in used)
        while True:
            yield from self.match(COMMAS)
            if (yield from self.peek()) in (")", ""):
                if self.left:
                    self.cut(1)
                    self.arguments("}")
                return
            word = yield from self.match(WORD)
            equals = yield from self.expect(self.equals)
            text = ("" if equals else word) + (yield from self._literal(keyed=equals is not None))
            key = word if equals else next(free, "argument")
            used.add(key)
            if not self.left:  # the value may not be whole
                return
            self.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {as_json(text)}")
            first = False

    def _literal(self, keyed: bool) -> Reading[str]:
        """Return the text of a value, up to the comma or parenthesis behind it. keyed: it has a name, so that a further
        one must have one too."""
        depth, quote, escaped, parts = 0, "", False, list[str]()
        while True:
            place = self._at
            if escaped and self.left:
                place, escaped = place + 1, False
            while (mark := MARKS.search(self._text, place)) is not None:
                char, place = mark[0], mark.end()
                if char == "\\":
                    escaped = place == len(self._text)
                    place += 1
                elif quote:
                    if char == quote and depth == 0:
                        ends = string_ends(self._text, place, keyed=keyed, marked=self.marked, whole=self._ended)
                        if ends is None:
                            break
                        quote = "" if ends else quote
                    elif char == quote:
                        quote = ""
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif depth == 0 and char in "),":
                    return "".join((*parts, self.cut(place - 1 - self._at)))
                elif char in ")]}":
                    depth -= 1
            undecided = mark is not None  # a quote, which is looked at again with what comes behind it
            parts.append(self.cut(place - 1 - self._at if undecided else self.left))
            if not (yield from self.more()) and not undecided:
                return "".join(parts)


def string_ends(text: str, place: int, *, keyed: bool, marked: bool, whole: bool) -> bool | None:
    """Return True if the quote before `place` ends a string, None if that takes more text (never if it is `whole`).

    Models leave out backslashes before quotes within a string. So a quote ends it only before what can follow a value:
    a comma and the next argument's name, or a parenthesis and the end of the calls or a further one. Between these are
    at most MOST_SPACE signs of white space. marked: text behind the parenthesis shows that the string goes on.
    """
    at = _behind_space(text, place)
    if (sign := text[at : at + 1]) not in (",", ")", ""):
        return False
    if sign == "," and not keyed:
        return True
    behind = _behind_space(text, at + 1) if sign else at
    following = text[behind : behind + 1]
    if not following:
        return True if whole or behind - at > MOST_SPACE else None
    if sign == ")" and (not marked or following in "]<`" or "\n" in text[at:behind]):
        return True
    if sign == ",":
        return following == ")" or _word_before("=", text, behind, whole)
    if following != ",":
        return False
    behind = _behind_space(text, behind + 1)
    return text[behind : behind + 1] == "]" or _word_before("(", text, behind, whole)


def _behind_space(text: str, at: int) -> int:
    return SOME_SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too


def _word_before(sign: str, text: str, at: int, whole: bool) -> bool | None:
    """Return True if a name and the sign stand there, None if that takes more text."""
    behind = SOME_WORD.match(text, at).end()  # type: ignore[union-attr]
    following = text[(last := _behind_space(text, behind)) : last + 1]
    if not following and last - at < 2 * MOST_SPACE:
        return True if whole else None
    return behind > at and following == sign


def as_json(text: str) -> str:
    """Return a Python literal as JSON. Text that is none becomes a string."""
    bare = text.strip()
    if bare in WORDS:
        return json.dumps(WORDS[bare])
    for read in (partial(json.loads, strict=False), python_literal, _repaired, _quoted_within):
        try:
            value: Any = read(bare)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            continue
    return json.dumps(bare, ensure_ascii=False)


def _repaired(text: str) -> object:
    """Return the value of what Python refuses although it can only mean one thing: strings with line breaks or zero
    bytes within, a whole number with zeros before it, a set. Raise ValueError for all other text."""
    if ZEROS.fullmatch(text) is not None:
        return int(text)
    text = STRING.sub(lambda string: RAW.sub(_in_a_string, string[0]), text)
    return python_literal(f"[{text[1:-1]}]" if SET.match(text) and ":" not in text else text)


def _quoted_within(text: str) -> object:
    """Return a string in which the quotes around it stand unescaped too: "echo "hi" there". Raise ValueError for all
    other text."""
    around = text[:1]
    if around not in ("'", '"') or len(text) < 2 or text[-1] != around:
        raise ValueError("this is no string.")
    inner = QUOTED.sub(lambda sign: f"\\{sign[0]}" if sign[0] == around else sign[0], text[1:-1])
    return python_literal(STRING.sub(lambda string: RAW.sub(_in_a_string, string[0]), f"{around}{inner}{around}"))


def _in_a_string(sign: re.Match[str]) -> str:
    return sign[0] if sign[0][0] == "\\" else f"\\x{ord(sign[0]):02x}"


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
