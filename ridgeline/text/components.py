"""Checks of the parts of a tokenizer's files that may ask for too much memory. The library ends the process when memory
runs out."""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError

MAX_GROWTH = 1000  # characters made of one by all replacements in a row; real tokenizers stay below ten

_PARTS = ("normalizer", "decoder")
_PART = re.compile(r'"(normalizer|decoder)"\s*:\s*(?=[{\[])')
# A pattern for runs of one kind of character at the end of a line, as it stands in a tokenizer.json: `\\s+$`, ` +$`.
_AT_END = re.compile(r'("Regex"\s*:\s*")( |\\\\[sSdDwW]|\\\\[pP]\{\w+\})\+\$"')


def with_runs_tried_once(text: str) -> str:
    """Return a tokenizer.json whose patterns for runs at the end of a line try each run from its beginning alone.

    They find the same: from a later place in a run a match ends where one from its beginning would. Tried from each
    place, a long run that is not at an end would take time that grows with the square of its length.
    """
    return _AT_END.sub(r'\1(?<!\2)\2+$"', text)


def check_charsmap(data: bytes) -> None:
    """Check sentencepiece's compiled table of replacements, which begins with its length. Raise ModelLoadError."""
    size = int.from_bytes(data[:4], "little")
    if data and size > len(data) - 4:
        raise ModelLoadError(
            f"the tokenizer's precompiled_charsmap promises {size} bytes and has {max(0, len(data) - 4)}; copy the "
            "tokenizer's files again."
        )


def check_text(text: str) -> None:
    """Check a tokenizer.json before the library reads it. Raise ModelLoadError, or ValueError if it is no JSON.

    Only two parts can ask for much. They are found without parsing the vocabulary, which takes long.
    """
    if "\\u00" in text:  # the parts' names may be spelled in escapes
        parts = [(name, part) for name, part in json.loads(text).items() if name in _PARTS]
    else:
        parts = list(_found(text))
    for name, part in parts:
        _check_part(name, part)


def _found(text: str) -> Iterator[tuple[str, object]]:
    """Yield the parts with their names, without those that stand within another."""
    decode, end = json.JSONDecoder().raw_decode, 0
    for found in _PART.finditer(text):
        if found.start() >= end:
            part, end = decode(text, found.end())
            yield found[1], part


def _check_part(name: str, part: object) -> None:
    growth = 1.0
    for step in _objects(part):
        charsmap, pattern, content = (step.get(key) for key in ("precompiled_charsmap", "pattern", "content"))
        if isinstance(charsmap, str):
            check_charsmap(binascii.a2b_base64(charsmap))
        if isinstance(pattern, dict) and isinstance(content, str):
            growth *= _growth(pattern, content)
    if growth > MAX_GROWTH:
        raise ModelLoadError(
            f"the tokenizer's {name} turns one character into {growth:.3g}, and at most {MAX_GROWTH} are allowed; "
            "remove the replacements that do so from its tokenizer.json."
        )


def _growth(pattern: Mapping[str, Any], content: str) -> float:
    """Return the most characters that one character becomes. A regular expression may match between any two."""
    if pattern.get("String"):
        return max(1.0, len(content) / len(pattern["String"]))
    return 1.0 + len(content)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting.extend(part for part in each.values() if isinstance(part, (dict, list)))
        elif isinstance(each, list):
            waiting.extend(part for part in each if isinstance(part, (dict, list)))
