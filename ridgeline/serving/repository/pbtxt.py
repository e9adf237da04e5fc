"""A reader of protobuf's text format, as `config.pbtxt` is written, without a schema: fields in their order.

    name: "m"  input [ { name: "text" } ]    →    [("name", "m"), ("input", [("name", "text")])]

Strings are `str`, numbers `int` or `float`, and names such as TYPE_INT32, true and false are `Name`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from ridgeline.core.errors import InvalidConfig

LARGEST = 1 << 20  # characters
MOST_LEVELS = 32
TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)f?\b)
    |(?P<name>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
CLOSING = {"{": "}", "<": ">"}

Fields = list[tuple[str, Any]]


class Name(str):
    """A word that is no string: the name of a constant."""


def read_pbtxt(text: str, source: str) -> Fields:
    """Return the fields of a message. `source` names the file in complaints. Raise InvalidConfig."""
    if len(text) > LARGEST:
        raise InvalidConfig(f"{source} has {len(text)} characters; at most {LARGEST} are read.")
    return _Reader(text, source).fields("", 0)


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self._text, self._source, self._at = text, source, 0
        self._kind, self._word = "", ""
        self._next()

    def fields(self, end: str, level: int) -> Fields:
        """Read fields up to `end`, or to the end of the text if that is empty."""
        if level > MOST_LEVELS:
            raise self._wrong(f"at most {MOST_LEVELS} levels")
        found: Fields = []
        while self._kind != "end" if not end else self._word != end or self._kind != "mark":
            if self._kind != "name":
                raise self._wrong("the name of a field")
            name = self._word
            self._next()
            colon = self._takes(":")
            if self._takes("["):
                while not self._takes("]"):
                    found.append((name, self._value(colon, level)))
                    if not self._takes(",") and self._word != "]":
                        raise self._wrong("a comma or ]")
            else:
                found.append((name, self._value(colon, level)))
            if not self._takes(","):
                self._takes(";")
        self._next()
        return found

    def _value(self, colon: bool, level: int) -> Any:
        kind, word = self._kind, self._word
        if kind == "mark" and word in CLOSING:
            self._next()
            return self.fields(CLOSING[word], level + 1)
        if not colon or kind not in ("string", "number", "name"):
            raise self._wrong("a value" if colon else "a colon")
        self._next()
        if kind == "name":
            return Name(word)
        if kind == "number":
            word = word.removesuffix("f") if not word.lower().startswith("0x") else word
            return int(word, 0) if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|0|[1-9]\d*)", word) else float(word)
        text = self._string(word)
        while self._kind == "string":  # neighbours belong together
            text += self._string(self._word)
            self._next()
        return text

    def _string(self, word: str) -> str:
        try:
            return str(ast.literal_eval(word))
        except (ValueError, SyntaxError):
            raise self._wrong("a string") from None

    def _takes(self, mark: str) -> bool:
        if self._kind != "mark" or self._word != mark:
            return False
        self._next()
        return True

    def _next(self) -> None:
        while True:
            if self._at >= len(self._text):
                self._kind, self._word = "end", ""
                return
            found = TOKEN.match(self._text, self._at)
            if found is None:
                raise self._wrong("something that can be read")
            self._at = found.end()
            if found.lastgroup != "skip":
                self._kind, self._word = str(found.lastgroup), found.group()
                return

    def _wrong(self, wanted: str) -> InvalidConfig:
        line = self._text.count("\n", 0, self._at) + 1
        return InvalidConfig(f"{self._source}, line {line}: expected {wanted}.")
