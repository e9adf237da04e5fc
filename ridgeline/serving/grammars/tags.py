"""Structural tags: text in which some parts have a form, as in vLLM and xgrammar, put into Lark's syntax.

The older form names triggers and what follows them:

    {"triggers": ["<function="], "structures": [{"begin": "<function=sum>", "schema": {…}, "end": "</function>"}]}

The newer one is a `format` of nested parts: const_string, json_schema, regex, any_text, sequence, or, tag,
triggered_tags, tags_with_separator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars import schemas

TEXT = r"TEXT: /(.|\n)*/"
MOST_PARTS = 1024


def to_lark(asked: Mapping[str, Any], tokens: Iterable[str] = (), details: Mapping[str, Any] | None = None) -> str:
    """Return the grammar of a structural tag. Raise InvalidRequest.

    tokens: names of special tokens, which a grammar must name, since they have no text.
    details: options for llguidance in every schema, except those that a schema sets itself.
    """
    writer = _Writer(tokens, details or {})
    if "format" in asked:
        start = writer.part(asked["format"])
    else:
        structures, triggers = asked.get("structures"), asked.get("triggers")
        if not isinstance(structures, list) or not structures or not _texts(triggers):
            raise _wrong("needs format, or structures and triggers, neither of them empty")
        tags = [_structure(each) for each in structures]
        start = writer.triggered({"triggers": triggers, "tags": tags})
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, TEXT])


def _structure(structure: Any) -> dict[str, Any]:
    schema = structure.get("schema") if isinstance(structure, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _wrong("has a structure without begin, schema and end")
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, tokens: Iterable[str], details: Mapping[str, Any]) -> None:
        names = sorted((name for name in tokens if name.startswith("<") and name.endswith(">")), key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, names))) if names else None
        self._details = details
        self.rules: list[str] = []
        self._parts: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda part: self._spelled(_text(part, "value")),
            "json_schema": self._schema,
            "regex": lambda part: self._rule(f"/{_text(part, 'pattern').replace('/', chr(92) + '/')}/", terminal=True),
            "any_text": lambda part: "TEXT",
            "sequence": lambda part: " ".join(map(self.part, _list(part, "elements"))),
            "or": lambda part: "(" + " | ".join(map(self.part, _list(part, "elements"))) + ")",
            "tag": self._tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self._separated,
        }

    def part(self, part: Any) -> str:
        """Return the items of a part."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        write = self._parts.get(str(kind))
        if write is None:
            raise _wrong(f"has a part of the type {str(kind)[:64]!r}; there are {', '.join(self._parts)}")
        if len(self.rules) > MOST_PARTS:
            raise _wrong(f"has more than {MOST_PARTS} parts")
        return write(part)

    def triggered(self, part: Mapping[str, Any]) -> str:
        """Write text in which a trigger begins one of the tags."""
        triggers, tags = _list(part, "triggers"), _list(part, "tags")
        if not _texts(triggers):
            raise _wrong("has a trigger that is no text, or an empty one")
        names = [self._triggered(tag, triggers) for tag in tags]
        choice = "(" + " | ".join(names) + ")"
        if part.get("stop_after_first"):
            return choice
        return f"{choice}{'+' if part.get('at_least_one') else '*'} TEXT"

    def _triggered(self, tag: Any, triggers: Sequence[str]) -> str:
        begin = _text(tag, "begin")
        trigger = max((each for each in triggers if begin.startswith(each)), key=len, default=None)
        if trigger is None:
            raise _wrong(f"has a tag that begins with {begin[:64]!r} and no trigger that does")
        rest = self._tag({**tag, "begin": begin[len(trigger) :]})
        if self._token is not None and self._token.fullmatch(trigger):
            return self._rule(f"TEXT {trigger} {rest}")
        return self._rule(f"{self._rule(f'TEXT {json.dumps(trigger)}', lazy=True)} {rest}")

    def _tag(self, part: Any) -> str:
        begin, end = _text(part, "begin"), _text(part, "end")
        content = part.get("content") if isinstance(part, Mapping) else None
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            plain = self._token is None or not self._token.search(end)
            inner = self._rule(f"TEXT {json.dumps(end)}", lazy=True) if plain else f"TEXT {self._spelled(end)}"
            return f"{self._spelled(begin)} {inner}".strip()
        return " ".join(filter(None, (self._spelled(begin), self.part(content), self._spelled(end))))

    def _separated(self, part: Mapping[str, Any]) -> str:
        one = "(" + " | ".join(self._rule(self._tag(tag)) for tag in _list(part, "tags")) + ")"
        separator = self._spelled(_text(part, "separator"))
        if part.get("stop_after_first"):
            return one
        several = f"{one} ({separator} {one})*"
        return several if part.get("at_least_one") else f"({several})?"

    def _schema(self, part: Mapping[str, Any]) -> str:
        schema = part.get("json_schema")
        if not isinstance(schema, Mapping):
            raise _wrong("has a json_schema that is no object")
        return self._rule(f"%json {json.dumps(schemas.with_details(schemas.known(schema), self._details))}")

    def _spelled(self, text: str) -> str:
        """Return a text as items: its special tokens by name, and what is between them in quotes."""
        if self._token is None:
            return json.dumps(text) if text else ""
        items, place = [], 0
        for found in self._token.finditer(text):
            items += [json.dumps(text[place : found.start()])] * (found.start() > place) + [found[0]]
            place = found.end()
        return " ".join([*items, *([json.dumps(text[place:])] if place < len(text) else [])])

    def _rule(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        """Add a rule, and return its name."""
        name = f"{'R' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _text(part: Any, name: str) -> str:
    value = part.get(name) if isinstance(part, Mapping) else None
    if not isinstance(value, str):
        raise _wrong(f"has a part without the text {name}")
    return value


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"has a part without {name}, or with an empty list of them")
    return value


def _texts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) and value for value in values)


def _wrong(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the structural tag {reason}.", param="structural_tag")
