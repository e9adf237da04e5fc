"""Grammars of texts that stand within a string of JSON: the same grammar, of the text with its escapes.

    quoted('start: "a" LF\\n%import common.LF')    # start: "a" t_lf, t_lf: "\\\\n"

A quote, a backslash and a control character have the one escape that JSON gives them, and all else stays. The library
reads lexemes without going back, and escapes begin alike, so each escape is a lexeme of its own: a pattern with such
characters becomes a rule. Only what leaves no doubt is taken; the rest raises InvalidRequest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ridgeline.core.errors import InvalidRequest

# Terminals, with their flags, and comments. What is between them is rules.
PIECES = re.compile(r'(//[^\n]*)|("(?:[^"\\\n]|\\.)*")(i?)|/((?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+)/([imslux]*)')
IMPORT = re.compile(r"^%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([\w\s,]+)\))[ \t]*$", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPECIAL = [*map(chr, range(32)), '"', "\\"]
SPECIALS = r"[\u0022\u005c\u0000-\u001f]"
ORDINARY = [chr(code) for code in range(32, 0x250) if chr(code) not in SPECIAL]
# Of common terminals those that hold special characters
COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
}
SAFE = frozenset(
    {
        *("DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER", "SIGNED_NUMBER"),
        *("LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"),
    }
)
ODD = re.compile(r"%(?!import\b)\w+|&|<|@|~|\.\.")  # in rules: what may name other texts
DEFINED = re.compile(r"^[ \t]*[?!]?(_?[A-Z][A-Z0-9_]*)[ \t]*:", re.MULTILINE)
CODE = re.compile(r"\\[uU]([0-9a-f]{4,8})")  # of a character in a class
CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def string_of(lark: str) -> str:
    """Return the grammar of a string of JSON whose text follows a grammar. Raise InvalidRequest."""
    return f'start: "\\"" text "\\""\ntext: %lark {{\n{quoted(lark)}\n}}'


def quoted(lark: str) -> str:
    """Return the grammar of a text's spelling within JSON's quotes. Raise InvalidRequest if that cannot be said."""
    found, place = list[str](), 0
    text = IMPORT.sub(_imported, lark)
    bare = PIECES.sub(lambda piece: " " * len(piece[0]), text)  # rules alone, in their places
    terminals = {name: f"t{name.lower()}" if name[0] == "_" else f"t_{name.lower()}" for name in DEFINED.findall(bare)}
    for piece in PIECES.finditer(text):
        found.append(_rules(bare[place : piece.start()], terminals))
        comment, string, ignores_case, pattern, flags = piece.groups()
        if string is not None:
            found.append(_string(string, ignores_case))
        elif not comment:
            found.append(quoted_pattern(pattern, flags))
        place = piece.end()
    return "".join([*found, _rules(bare[place:], terminals)])


def quoted_pattern(pattern: str, flags: str = "") -> str:
    """Return the part of a rule that is a matching text's spelling within JSON's quotes. Raise InvalidRequest."""
    if set(flags) - set("su"):
        raise _wrong(f"has the flags {flags!r}")
    try:
        parsed = _parser.parse(pattern, re.DOTALL if "s" in flags else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(f"has the pattern {pattern[:64]!r}: {error}") from None
    if parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.VERBOSE | re.ASCII):
        raise _wrong("has flags within a pattern")
    return _Pattern(dot=r"[\s\S]" if parsed.state.flags & re.DOTALL else r"[^\n]").row(list(parsed))


def _imported(line: re.Match[str]) -> str:
    """Return definitions in place of imported terminals that hold special characters."""
    name, alias, several = line.groups()
    pairs = [(name, alias or name)] if name else [(each.strip(), each.strip()) for each in several.split(",")]
    lines = []
    for imported, called in pairs:
        if imported in COMMON:
            lines.append(f"{called}: {COMMON[imported]}")
        elif imported in SAFE:
            lines.append(f"%import common.{imported}" + (f" -> {called}" if called != imported else ""))
        else:
            raise _wrong(f"imports {imported}")
    return "\n".join(lines)


def _rules(text: str, terminals: Mapping[str, str]) -> str:
    """Return the text between terminals, in which terminals that the grammar defines are rules."""
    if (odd := ODD.search(text)) or "/" in text or '"' in text:
        raise _wrong(f"has {odd[0] if odd else text.strip()[:64]!r}")
    return WORD.sub(lambda word: terminals.get(word[0], word[0]), text)


def _string(literal: str, ignores_case: str) -> str:
    try:
        text = json.loads(literal)
    except ValueError:
        raise _wrong(f"has the text {literal[:64]}") from None
    spelled = _spelled(text)
    if ignores_case and spelled != text:
        raise _wrong(f"ignores the case of {literal[:64]}")
    return json.dumps(spelled, ensure_ascii=False) + ignores_case


def _spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


Node = tuple[Any, Any]
SINGLE = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)


class _Pattern:
    """Writes a parsed pattern as a part of a rule. dot: the class of characters that a point means."""

    def __init__(self, dot: str) -> None:
        self._dot = dot

    def row(self, nodes: Sequence[Node]) -> str:
        """Return nodes one after another. Those in a row that hold no special characters are one lexeme."""
        parts, plain = list[str](), ""
        for place, node in enumerate(nodes):
            if not self._is_special(node):
                plain += self._plain(node)
                continue
            parts += [f"/{plain}/"] if plain else []
            plain = ""
            self._check_end(nodes[:place], nodes[place:])
            self._check_end(nodes[: place + 1], nodes[place + 1 :])
            parts.append(self._special(node))
        parts += [f"/{plain}/"] if plain else []
        return "(" + " ".join(parts or ['""']) + ")"

    def _class(self, node: Node) -> str | None:
        """Return a node that is one character as a class, as Python and the grammars' library both read it."""
        kind, value = node
        if kind is sre.LITERAL:
            return f"[{literal(value)}]"
        if kind is sre.ANY:
            return self._dot
        if kind is sre.NOT_LITERAL:
            return f"[^{literal(value)}]"
        return "[" + "".join(_item(*item) for item in value) + "]" if kind is sre.IN else None

    def _inner(self, node: Node) -> list[Sequence[Node]]:
        """Return the rows within a node that is more than one character. Raise InvalidRequest for one of a kind that
        says more of a text than its characters."""
        kind, value = node
        if kind is sre.BRANCH:
            return list(map(list, value[1]))
        if kind is sre.SUBPATTERN and not (value[1] or value[2]):
            return [list(value[3])]
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):  # the texts are the same
            return [list(value[2])]
        raise _wrong(f"has a pattern with {str(kind).lower()}")

    def _is_special(self, node: Node) -> bool:
        known = self._class(node)
        if known is None:
            return any(self._is_special(each) for row in self._inner(node) for each in row)
        return any(map(re.compile(known).fullmatch, SPECIAL))

    def _plain(self, node: Node) -> str:
        """Return a node without special characters as a pattern."""
        if (known := self._class(node)) is not None:
            return known
        rows = ["".join(map(self._plain, row)) for row in self._inner(node)]
        times = _times(*node[1][:2]) if node[0] in (sre.MAX_REPEAT, sre.MIN_REPEAT) else ""
        return f"(?:{'|'.join(rows)}){times}"

    def _special(self, node: Node) -> str:
        """Return a node that holds special characters as a part of a rule."""
        if (known := self._class(node)) is not None:
            return _characters(known)
        rows = self._inner(node)
        if node[0] not in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return "(" + " | ".join(map(self.row, rows)) + ")"
        least, most, _ = node[1]
        known = self._class(rows[0][0]) if len(rows[0]) == 1 else None
        if known is not None and most is sre.MAXREPEAT and least <= 1:
            return _characters(known, many=True) + ("+" if least else "*")
        return self.row(rows[0]) + _times(least, most)

    def _check_end(self, before: Sequence[Node], behind: Sequence[Node]) -> None:
        """Raise InvalidRequest if a lexeme that is as long as can be would take what comes behind it."""
        ends = [each for node in _edge(reversed(before)) for each in self._repeated(node)]
        starts = [each for node in _edge(behind) for each in self._classes(node)]
        points = frozenset().union(*map(_points, (*ends, *starts)))
        if _matching(ends, points) & _matching(starts, points):
            raise _wrong("has a pattern whose end is not clear")

    def _classes(self, node: Node) -> list[str]:
        """Return the classes of characters that a node may begin with, or more."""
        if (known := self._class(node)) is not None:
            return [known]
        return [each for row in self._inner(node) for inner in _edge(row) for each in self._classes(inner)]

    def _repeated(self, node: Node) -> list[str]:
        """Return the classes of characters that a node may end with any number of, or more."""
        if self._class(node) is not None:
            return []
        rows = self._inner(node)
        if node[0] in (sre.MAX_REPEAT, sre.MIN_REPEAT) and node[1][0] != node[1][1]:
            return [each for row in rows for inner in row for each in self._classes(inner)]
        return [each for row in rows for inner in _edge(reversed(row)) for each in self._repeated(inner)]


@lru_cache(4096)
def _points(known: str) -> frozenset[str]:
    """Return characters that need no escape and tell a class from others: the usual ones, and those beside the ends of
    its ranges. Of two classes that overlap, one has such a character in common with the other."""
    codes = [int(found, 16) for found in CODE.findall(known)]
    near = {code + step for code in codes for step in (-1, 0, 1) if 32 <= code + step <= 0x10FFFF}
    return frozenset(ORDINARY) | {chr(code) for code in near} - frozenset(SPECIAL)


def _matching(classes: Iterable[str], points: Iterable[str]) -> frozenset[str]:
    """Return the characters that are in one of the classes."""
    matches = [re.compile(known).fullmatch for known in classes]
    return frozenset(point for point in points if any(match(point) for match in matches))


def _edge(row: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes of a row up to the first that cannot be empty, or some more."""
    for node in row:
        yield node
        kind, value = node
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[0] and len(value[2]) == 1:
            [(kind, _)] = value[2]
        if kind in SINGLE:
            return


def _characters(known: str, *, many: bool = False) -> str:
    """Return one character of a class, or with `many` some that need no escape, as lexemes."""
    matches = re.compile(known).fullmatch
    spelled = [_spelled(each).removeprefix("\\") for each in SPECIAL if matches(each)]
    escapes = [rf"/\u005c(?:{'|'.join(''.join(map(literal, map(ord, each))) for each in spelled)})/"] * bool(spelled)
    plain = [f"/[{known}--{SPECIALS}]{'+' if many else ''}/"] if _matching([known], _points(known)) else []
    return "(" + " | ".join([*plain, *escapes]) + ")"


def _times(least: int, most: Any) -> str:
    return f"{{{least},{'' if most is sre.MAXREPEAT else most}}}"


def _item(kind: Any, value: Any) -> str:
    """Return a part of a class."""
    if kind is sre.NEGATE:
        return "^"
    if kind is sre.LITERAL:
        return literal(value)
    if kind is sre.RANGE:
        return "-".join(map(literal, value))
    return CATEGORIES[value]


def literal(code: int) -> str:
    """Return a character in a pattern that Python and the grammars' library both read, also within a class."""
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _wrong(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar {reason}, which cannot be held within JSON.")
