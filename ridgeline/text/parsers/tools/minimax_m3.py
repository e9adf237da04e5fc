"""Tool calls in the form of MiniMax M3, whose arguments are elements, and elements within those:

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>

Elements within an element are the keys of an object, or, by the tool's schema, the items of a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.literals import DEEPEST
from ridgeline.text.parsers.scanner import Give, Reading, Tags
from ridgeline.text.parsers.xml import QUOTES, Types, as_json

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
CALL, BEGIN = f"{MARK}<invoke name=", f"{MARK}<"
OUTER = ("/invoke", "/tool_call")
LONGEST_TAG = 256


class MinimaxM3Parser(CallParser):
    """Strings are given as they come, other arguments when they are complete."""

    opens, next_calls = Tags(OPEN, CALL), Tags(CALL, CLOSE)
    begins, name_end = Tags(BEGIN), Tags(">")

    def parse(self) -> Reading[None]:
        while (tag := (yield from self.until(self.opens, self.content))) is not None:
            while tag is not None and tag != CLOSE:
                blank = (yield from self.space()) if tag == OPEN else ""
                if tag == OPEN and (yield from self.expect(self.next_calls)) != CALL:
                    self.content(OPEN + blank)
                    break
                ended = yield from self._call()
                if ended is None:
                    break
                yield from self.space()
                tag = CLOSE if ended == "/tool_call" else (yield from self.expect(self.next_calls))
            else:
                yield from self.space()

    def _call(self) -> Reading[str | None]:
        """Read on from the opening tag of a call to its end. Return the tag there, or None if it is no call."""
        said, tag = yield from self.word(self.name_end)
        name = said.strip().strip(QUOTES)
        if tag is None or not name:
            self.content(CALL + said + (tag or ""))
            return None
        self.begin(name)
        types, separator = Types(self.tools.get(name, {})), "{"
        schema = types.container(self.tools.get(name, {}))
        seen = set[str]()
        while (key := (yield from self._tag(self.drop))) is not None and key[:1] != "/":
            if key in seen:  # the first holds, since it has been given
                _, ended = yield from self._value(True, types, 1)
                if ended is None or ended in OUTER:
                    self.arguments("}" if ended is not None else "")
                    return ended
                continue
            seen.add(key)
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator, part = ", ", _part(schema, key)
            if types.of_part(part) == {"string"}:
                ended = yield from self._string(key)
            else:
                value, ended = yield from self._value(part, types, 1)
                self.arguments(value if ended is not None else "")
            if ended is None or ended in OUTER:
                self.arguments("}" if ended is not None else "")
                return ended
        if key is not None:
            self.arguments("{}" if separator == "{" else "}")
        return key

    def _tag(self, give: Give) -> Reading[str | None]:
        """Give the text before the next tag, and return the tag's name, with the stroke of one that ends something;
        None if the text ends."""
        while (yield from self.until(self.begins, give, whole=False)) is not None:
            if (yield from self.ahead(self.name_end, LONGEST_TAG)) is not None:
                name, end = yield from self.taken(self.name_end)
                return name if end is not None else None
            give(BEGIN)
        return None

    def _string(self, key: str) -> Reading[str | None]:
        """Give a text as it comes up to the end of its element. Return the tag that ended it, None for the text's
        end."""
        self.arguments('"')
        give = lambda piece: self.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])  # noqa: E731
        while (tag := (yield from self._tag(give))) is not None and tag not in (f"/{key}", *OUTER):
            give(f"{BEGIN}{tag}>")
        self.arguments('"' if tag is not None else "")
        return tag

    def _value(self, schema: object, types: Types, depth: int) -> Reading[tuple[str, str | None]]:
        """Return an element's value as JSON, and the tag that ended it, which may be that of an element around it;
        None if the text ends."""
        found: list[tuple[str, str]] = []
        allowed, inner = types.of_part(schema), types.container(schema)
        items = inner.get("items", True) if "array" in allowed and "object" not in allowed else None
        while True:
            parts: list[str] = []
            key = yield from self._tag(parts.append)
            if key is None or (key[:1] != "/" and depth == DEEPEST):
                return "", None
            if key[:1] == "/":
                return _joined(found, "".join(parts), allowed), key
            value, ended = yield from self._value(_part(inner, key) if items is None else items, types, depth + 1)
            found.append((key, value))
            if ended is None or ended != f"/{key}":
                return _joined(found, "", allowed), ended


def _joined(found: list[tuple[str, str]], text: str, allowed: frozenset[str]) -> str:
    """Return the JSON of an element with these elements, or with this text."""
    if not found:
        empty = not text.strip() and "string" not in allowed
        return (
            "[]"
            if empty and "array" in allowed
            else "{}"
            if empty and "object" in allowed
            else as_json(text, allowed, False)
        )
    if "array" in allowed and "object" not in allowed:
        return f"[{', '.join(value for _, value in found)}]"
    values: dict[str, list[str]] = {}
    for key, value in found:
        values.setdefault(key, []).append(value)
    parts = [f"{json.dumps(key, ensure_ascii=False)}: {_one_or_list(each)}" for key, each in values.items()]
    return f"{{{', '.join(parts)}}}"


def _one_or_list(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _part(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of a key. One that is not named is a text."""
    properties = schema.get("properties")
    return properties.get(key, TEXT) if isinstance(properties, Mapping) else TEXT


TEXT = {"type": "string"}
FORM = ToolForm(
    name="minimax_m3",
    parser=MinimaxM3Parser,
    known_by=((MARK,),),
    tags=(MARK,),
    opens=(OPEN,),
)
