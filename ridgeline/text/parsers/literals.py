"""Literals of Python, which some models write where JSON should stand.

`ast.literal_eval` compiles what it reads, and the time for some texts grows with the square of their length. This
reader takes a text in one pass.
"""

from __future__ import annotations

import re
import unicodedata

DEEPEST = 200  # brackets within brackets, as in Python
MOST_KEYS = 1024  # that are numbers: a client can choose many whose hashes are equal

_WORDS = {"True": True, "False": False, "None": None}
_WORD = re.compile(r"\w+")
_DIGITS = r"[0-9](?:_?[0-9])*+"
_NUMBER = re.compile(
    rf"(?P<whole>0[xX](?:_?[0-9a-fA-F])++|0[oO](?:_?[0-7])++|0[bB](?:_?[01])++|{_DIGITS}(?![.eE]))"
    rf"|(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?"
)
_QUOTE = re.compile(r"""(?P<raw>[rR]?)[uU]?('''|\"""|'|")""")
_ENDS = {quote: re.compile(rf"\\|{quote}" + ("|\n" if len(quote) == 1 else "")) for quote in ("'", '"', "'''", '"""')}
_ESCAPE = re.compile(
    r"\\(?:(?P<plain>[\n\\'\"abfnrtv])|(?P<octal>[0-7]{1,3})|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})"
    r"|U(?P<U>[0-9a-fA-F]{8})|N\{(?P<name>[^}]+)\}|(?P<wrong>[xuUN])|.)",
    re.DOTALL,
)
_PLAIN = dict(zip("\n\\'\"abfnrtv", ("", *"\\'\"\a\b\f\n\r\t\v"), strict=True))
_INSIDE = re.compile(r"(?:[ \t\f\n]|\\\n|#[^\n]*+)*+")  # white space between brackets
_OUTSIDE = re.compile(r"(?:[ \t\f]|\\\n)*+(?:(?=[#\n])(?:[ \t\f\n]|#[^\n]*+)*+\Z)?")
_BEFORE = re.compile(r"(?:[ \t\f]*+(?:#[^\n]*+)?\n)*+")


def python_literal(text: str) -> object:
    """Return the value of a literal: None, a boolean, a number, a string, or a list, tuple or dictionary of them.

    Raise ValueError or TypeError for all other text. Sets, bytes and complex numbers, which `ast.literal_eval` reads,
    are refused as well, because JSON has none.
    """
    return _Literal(text).whole()


class _Literal:
    """A reader from left to right. `_depth` counts the open brackets."""

    def __init__(self, text: str) -> None:
        if "\0" in text:
            raise ValueError("a literal has no zero bytes")
        self._text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        self._at = self._depth = self._keys = 0
        self._signed = False  # the last number has a sign, and may have no other

    def whole(self) -> object:
        before = _BEFORE.match(self._text)
        self._at = before.end() if before else 0
        value = self._value()
        if self._next() == ",":
            value = (value, *self._items(""))
        if self._next():
            raise ValueError(f"it goes on at {self._at}")
        return value

    def _next(self) -> str:
        """Skip white space, and return the next character without taking it; "" at the end."""
        text, at = self._text, self._at
        if at < len(text) and text[at] in " \t\f\n\\#":
            found = (_INSIDE if self._depth else _OUTSIDE).match(text, at)
            at = self._at = found.end() if found else at
        return text[at : at + 1]

    def _value(self) -> object:
        char = self._next()
        if char not in ("-", "+"):
            return self._bare(char)
        self._at += 1
        value = self._bare(self._next())
        if self._signed or type(value) not in (int, float):
            raise ValueError("a sign stands before something else than a number")
        self._signed = True
        return -value if char == "-" else value  # type: ignore[operator]

    def _bare(self, char: str) -> object:
        """Read a value without a sign, which begins with this character."""
        if char in ("[", "(", "{") and char:
            return self._bracket(char)
        self._signed = False
        if char.isdecimal() or char == ".":
            return self._number()
        if (quote := _QUOTE.match(self._text, self._at)) is not None:
            return self._strings(quote)
        word = _WORD.match(self._text, self._at)
        if word is None or word[0] not in _WORDS:
            raise ValueError(f"no literal stands at {self._at}")
        self._at = word.end()
        return _WORDS[word[0]]

    def _bracket(self, char: str) -> object:
        self._at, self._depth = self._at + 1, self._depth + 1
        if self._depth > DEEPEST:
            raise ValueError("too many brackets stand within one another")
        value: object
        if char == "[":
            value = [] if self._next() == "]" else [self._value(), *self._items("]")]
        elif char == "{":
            value = self._entries()
        elif self._next() == ")":
            value = ()
        else:
            value = self._value()
            if self._next() == ",":
                value = (value, *self._items(")"))
        self._take("])}"["[({".index(char)])
        self._depth -= 1
        if char != "(" or isinstance(value, tuple):
            self._signed = False
        return value

    def _items(self, end: str) -> list[object]:
        """Read the items behind the first one, up to the end."""
        found = []
        while self._next() == ",":
            self._at += 1
            if self._next() == end:
                break
            found.append(self._value())
        return found

    def _entries(self) -> dict[object, object]:
        found: dict[object, object] = {}
        while self._next() != "}":
            key = self._value()
            self._take(":")
            self._keys += not isinstance(key, str)
            if self._keys > MOST_KEYS:
                raise ValueError("too many keys are no strings")
            found[key] = self._value()
            if self._next() != ",":
                break
            self._at += 1
        return found

    def _take(self, char: str) -> None:
        if self._next() != char:
            raise ValueError(f"there is no {char} at {self._at}")
        self._at += 1

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            raise ValueError(f"no number stands at {self._at}")
        self._at = found.end()
        if _WORD.match(self._text, self._at) is not None:
            raise ValueError(f"a number has letters at {self._at}")
        return int(found[0], 0) if found["whole"] else float(found[0])

    def _strings(self, quote: re.Match[str] | None) -> str:
        """Read strings that stand side by side, which are one."""
        parts = []
        while quote is not None:
            end, place = _ENDS[quote[2]], quote.end()
            while (mark := end.search(self._text, place)) is not None and mark[0] == "\\":
                place = mark.end() + 1
            if mark is None or mark[0] == "\n":
                raise ValueError(f"the string at {self._at} does not end")
            inside = self._text[quote.end() : mark.start()]
            parts.append(inside if quote["raw"] or "\\" not in inside else _ESCAPE.sub(_meant, inside))
            self._at = mark.end()
            self._next()
            quote = _QUOTE.match(self._text, self._at)
        return "".join(parts)


def _meant(escape: re.Match[str]) -> str:
    """Return the text that a backslash and the characters behind it stand for."""
    kind = escape.lastgroup
    if kind is None:
        return escape[0]
    if kind == "plain":
        return _PLAIN[escape["plain"]]
    if kind == "name":
        try:
            return unicodedata.lookup(escape["name"])
        except KeyError:
            raise ValueError(f"no character is called {escape['name'][:80]!r}") from None
    number = -1 if kind == "wrong" else int(escape[kind], 8 if kind == "octal" else 16)
    if not 0 <= number <= 0x10FFFF:
        raise ValueError(f"{escape[0][:10]!r} is no character")
    return chr(number)
