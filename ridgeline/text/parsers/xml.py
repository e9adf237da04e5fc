"""Tool calls whose arguments are tagged texts, each under its name. What a text means follows from the tool's schema: a
string is taken as it stands, and numbers, booleans, lists and objects are decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.text.parsers.calls import CallParser, Tools, decoded, escaped, no_constant
from ridgeline.text.parsers.literals import python_literal
from ridgeline.text.parsers.scanner import Give, Reading, Tags

MOST_REFERENCES = 8  # followed one after another
ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
SPELLED = {  # names of types that tools have in place of JSON Schema's
    **{"float": "number", "double": "number", "int": "integer", "long": "integer", "bool": "boolean"},
    **{"str": "string", "text": "string", "dict": "object", "list": "array"},
}
ZEROS = re.compile(r"(-?)0+([0-9]+)")
PYTHON = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True, kw_only=True)
class XmlTags:
    """The tags of a form.

    open, close: around calls.
    call, call_end: around one call, behind whose first tag its name stands; "" if `open` and `close` have one call.
    short: the text of `call` where the model left a part of it out, or "".
    name_end: behind the name; "" if the first key or the call's end follows.
    key, key_end: around an argument's name.
    value, value_end: around an argument's text; `value` may be "".
    line: a text stands on lines of its own, whose first and last line break do not belong to it.
    """

    open: str
    close: str
    call: str = ""
    short: str = ""
    call_end: str = ""
    name_end: str = ""
    key: str
    key_end: str
    value: str = ""
    value_end: str
    line: bool = False


class XmlParser(CallParser):
    """Strings are given as they come, other arguments when they are complete. A call may lack the tags around it."""

    form: XmlTags

    def __init__(self, tools: Tools | None = None) -> None:
        form = self.form
        self._end = form.call_end or form.close
        self._calls = tuple(filter(None, (form.call or form.open, form.short)))
        self._opens = Tags(*dict.fromkeys((form.open, *self._calls)))
        self._next = Tags(*(self._calls if form.call else ()), form.close)
        self._names = Tags(*filter(None, (form.name_end, form.key if not form.name_end else "", self._end)))
        self._keys = Tags(*dict.fromkeys((form.key, self._end, form.close)))
        self._key_end = Tags(form.key_end)
        self._value_ends = Tags(*dict.fromkeys((form.value_end, form.key, self._end, form.close)))
        self._behind = {  # what may follow where a value ends
            form.value_end: self._keys,
            form.close: self._opens,
            **({form.call_end: self._next} if form.call_end else {}),
        }
        self._value = Tags(form.value) if form.value else None
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # by function and argument, of those that came
        super().__init__(tools)

    def parse(self) -> Reading[None]:
        form = self.form
        while (tag := (yield from self.until(self._opens, self.content))) is not None:
            while tag is not None and tag != form.close:
                if tag in self._calls:
                    tag = yield from self._call(tag)
                else:
                    blank = yield from self.space()
                    tag = yield from self.expect(self._next)
                    if tag is None:  # no call of this form
                        self.content(form.open + blank)
            yield from self.space()

    def _call(self, opened: str) -> Reading[str | None]:
        """Read on from a call's opening tag to its end, and return the tag there."""
        form = self.form
        name, tag = yield from self.word(self._names)
        if tag is None or not name.strip() or (form.name_end and tag != form.name_end):
            self.content(opened + name + (tag or ""))
            return tag
        name = name.strip().strip("\"'")
        self.begin(name)
        schema, first = self.tools.get(name, {}), True
        if tag == form.name_end:
            tag = yield from self.until(self._keys, self.drop)
        while tag == form.key:
            key, tag = yield from self.taken(self._key_end)
            if self._value is not None:
                tag = yield from self.until(self._value, self.drop)
            if tag is None:
                break
            key, said = self.named(key.strip())
            self.arguments(f"{'{' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            first = False
            if (name, key) not in self._types:
                self._types[name, key] = types_of(schema, key)
            types = self._types[name, key]
            if said is not None:
                types = _agreed(said, types) if is_named(schema, key) else said
            tag = yield from self._read_value(types, schema)
            if tag == form.value_end:
                tag = yield from self.until(self._keys, self.drop)
        if tag is not None or first:
            self.arguments("{}" if first else "}")
        if tag == self._end and tag != form.close:
            yield from self.space()
            return (yield from self.until(self._next, self.drop)) if (yield from self.peek()) == "<" else None
        return tag

    def named(self, key: str) -> tuple[str, frozenset[str] | None]:
        """Return an argument's name, and its types if the form says them."""
        return key.strip(QUOTES), None

    def _read_value(self, types: frozenset[str], schema: Mapping[str, Any]) -> Reading[str | None]:
        """Give an argument's value, and return the tag that ends it: its own, or that of what comes next if the model
        left its own out; None if the text ends."""
        parts: list[str] = []
        give: Give = parts.append
        if types == {"string"}:
            self.arguments('"')
            give = Framed(lambda piece: self.arguments(json.dumps(piece, ensure_ascii=False)[1:-1]), self.form.line)
        last = LastSign(give)
        while (tag := (yield from self.until(self._value_ends, last, whole=False))) is not None:
            if (yield from self._ends_value(tag, schema, last.sign == "\n")):
                self.arguments('"' if types == {"string"} else as_json("".join(parts), types, self.form.line))
                return tag
            last(tag)
        return None

    def _ends_value(self, tag: str, schema: Mapping[str, Any], line: bool) -> Reading[bool]:
        """Return True if a tag ends an argument, and False if it is a part of the argument's text: what comes behind it
        would then be none of what may. `line` says that the tag begins a line. One that is the whole line ends a text
        that stands on lines of its own, whatever comes behind it."""
        if tag == self.form.key:
            name = yield from self.ahead(self._key_end, LONGEST_NAME)
            properties = schema.get("properties")
            if name is None or not isinstance(properties, Mapping):
                return name is not None
            cut_off = len(name) == self.left
            return cut_off or self.named(name.strip())[0] in properties
        if not self.form.line and tag in (self.form.value_end, self.form.close):
            return True
        if (yield from self.follows(self._behind[tag])):
            return True
        return line and (yield from self.peek()) == "\n"


LONGEST_NAME = 64  # of an argument, with the form's own signs
QUOTES = "\"'"


def _agreed(said: frozenset[str], known: frozenset[str]) -> frozenset[str]:
    """Return the types of an argument that the model calls a string or JSON. The schema decides where it allows no such
    value."""
    return said if said == {"string"} and "string" in known else (known - {"string"}) or known


class LastSign:
    """A giver that knows the last character of what it was given."""

    def __init__(self, give: Give) -> None:
        self._give, self.sign = give, ""

    def __call__(self, text: str) -> None:
        self._give(text)
        self.sign = text[-1:]


class Framed:
    """A giver that leaves out one line break at each end of what it is given, if `line` says so."""

    def __init__(self, give: Give, line: bool) -> None:
        self._give, self._line, self._begun, self._held = give, line, False, ""

    def __call__(self, text: str) -> None:
        if not self._line:
            self._give(text)
            return
        if not self._begun:
            self._begun, text = True, text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self._give(text)


def is_named(schema: Mapping[str, Any], name: str) -> bool:
    """Return True if the schema of a function describes this argument."""
    properties = schema.get("properties")
    return isinstance(properties, Mapping) and name in properties


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types that an argument may have by the schema of a function. One that it does not know is a string."""
    return Types(schema).of_part(schema["properties"][name]) if is_named(schema, name) else frozenset({"string"})


class Types:
    """The types that parts of a schema allow. A part is looked at once for each depth, however many refer to it."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        self._known: dict[tuple[int, int], frozenset[str]] = {}

    def of_part(self, part: object) -> frozenset[str]:
        return self.of(part, MOST_REFERENCES)

    def container(self, part: object) -> Mapping[str, Any]:
        """Return the schema with the keys or items of a part: what it refers to, or its only choice that has some."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(part, Mapping):
                break
            if isinstance(reference := part.get("$ref"), str):
                part = _referred(reference, self._whole)
                continue
            listed = [part.get(name) for name in ("anyOf", "oneOf", "allOf")]
            choices = [each for some in listed if isinstance(some, list) for each in some]
            fitting = [each for each in choices if len(self.of_part(each) & {"object", "array"}) == 1]
            if len(fitting) != 1 or part.keys() & {"properties", "items"}:
                return part
            part = fitting[0]
        return part if isinstance(part, Mapping) else {}

    def of(self, part: object, depth: int) -> frozenset[str]:
        if not isinstance(part, Mapping) or depth == 0:
            return ANY
        known = self._known.get((id(part), depth))
        if known is None:
            known = self._known[id(part), depth] = self._found(part, depth)
        return known

    def _found(self, part: Mapping[str, Any], depth: int) -> frozenset[str]:
        if isinstance(reference := part.get("$ref"), str):
            return self.of(_referred(reference, self._whole), depth - 1)
        named = part.get("type")
        if isinstance(named, str):
            return frozenset({SPELLED.get(named, named)})
        if isinstance(named, list):
            return frozenset(SPELLED.get(each, each) for each in named if isinstance(each, str)) or ANY
        for choice in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(choice), list) and part[choice]:
                found = [self.of(each, depth - 1) for each in part[choice]]
                return frozenset.intersection(*found) if choice == "allOf" else frozenset.union(*found)
        values = [part["const"]] if "const" in part else part.get("enum")
        return _types_of_values(values) if isinstance(values, list) and values else ANY


def _types_of_values(values: Iterable[object]) -> frozenset[str]:
    return frozenset(PYTHON.get(type(value), "null") for value in values)


def _referred(reference: str, whole: Mapping[str, Any]) -> object:
    part: object = whole
    for step in reference.removeprefix("#/").split("/"):
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def as_json(text: str, types: frozenset[str], line: bool) -> str:
    """Return an argument's text as JSON of one of the types. A text that fits none of them is a string."""
    bare = text.strip()
    if "string" not in types and types & {"integer", "number"}:
        bare = ZEROS.sub(r"\1\2", bare) if ZEROS.fullmatch(bare) else bare
    value = decoded(bare, no_constant)
    fits = (value is not None or bare == "null") and _fits(value, types)
    if fits and not isinstance(value, str):
        return escaped(bare)
    if "string" not in types or bare == "None":
        try:
            value = python_literal(bare.capitalize() if bare in ("true", "false") else bare)
            if not isinstance(value, str) and _fits(value, types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            pass
    if "string" not in types and isinstance(decoded(bare, no_constant), str):
        return escaped(bare)
    return json.dumps(text.removeprefix("\n").removesuffix("\n") if line else text, ensure_ascii=False)


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = PYTHON.get(type(value), "null" if value is None else "")
    whole = isinstance(value, float) and value.is_integer()
    return kind in types or (kind == "integer" and "number" in types) or (whole and "integer" in types)
