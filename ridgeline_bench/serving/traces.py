"""Trace files as requests that come one after the other, read line by line.

| format | a line |
|---|---|
| Mooncake's | JSON: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens |
| Azure's | CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`; a timestamp is a date and a time |
| ours | JSON: `timestamp` in seconds, `input_length`, `output_length` (`trace.py`) |

Files come from strangers. A line has at most LONGEST_LINE characters, and what is remembered of earlier lines is
bounded.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.traffic import Ask, Piece

LONGEST_LINE = 1 << 20
MOST_TOKENS = 1 << 24  # of a prompt or an answer
BLOCK = 512  # tokens that one of Mooncake's ids stands for
IDS = 1 << 29  # ids of blocks are below; contents of our own are from there on
KEPT_IDS = 1 << 20  # blocks that are remembered for the ideal hit rate, about 100 MB
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def asks(path: Path, time_scale: float = 1.0, most: int = 0) -> Iterator[Ask]:
    """Yield the requests of a file, the first at 0 seconds, and at most `most` of them (0: all). time_scale: a factor
    on all times. Raise InvalidConfig, naming file and line, for a line that is no request or goes back in time."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _asks(file, str(path), time_scale, most)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read the trace {str(path)!r} ({error}).") from error


def _asks(file: TextIO, name: str, scale: float, most: int) -> Iterator[Ask]:
    seen: OrderedDict[int, None] = OrderedDict()
    csv, found, start, before = False, 0, 0.0, 0.0
    for number, line in _lines(file, name):
        where = f"{name}:{number}"
        if number == 1 and line.lstrip("\ufeff").startswith(AZURE[0]):
            if tuple(cell.strip() for cell in line.lstrip("\ufeff").split(",")) != AZURE:
                raise InvalidConfig(f"{where}: the header must be {','.join(AZURE)}, got {line[:80]!r}.")
            csv = True
            continue
        at, prompt, output, ids = _azure(line, where) if csv else _row(line, where)
        start = start if found else at
        if at < max(start, before):
            raise InvalidConfig(f"{where}: its time lies {max(start, before) - at:g} s before that of an earlier line.")
        before = at
        pieces = _pieces(ids, prompt, found, where)
        yield Ask(
            number=found,
            at=(at - start) * scale,
            prompt=pieces,
            answer=Piece(IDS + (2 * found + 1) % IDS, output),
            seen=_seen(ids, seen) if ids else 0,
        )
        found += 1
        if found == most:
            return
    if not found:
        raise InvalidConfig(f"the trace {name!r} has no requests.")


def _lines(file: TextIO, name: str) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise InvalidConfig(f"{name}:{number} has more than {LONGEST_LINE} characters, which no request needs.")
        if line.strip():
            yield number, line.strip()


def _azure(line: str, where: str) -> tuple[float, int, int, list[int]]:
    cells = line.split(",")
    if len(cells) != len(AZURE):
        raise InvalidConfig(f"{where} must have the cells {','.join(AZURE)}, got {line[:80]!r}.")
    try:
        moment = datetime.fromisoformat(cells[0].strip()[:26])  # seven digits behind the point are one too many
        at = moment.replace(tzinfo=None).timestamp()
        prompt, output = int(cells[1]), int(cells[2])
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidConfig(f"{where} must be a date with a time and two numbers, got {line[:80]!r}.") from error
    return at, _tokens(prompt, AZURE[1], where), _tokens(output, AZURE[2], where), []


def _row(line: str, where: str) -> tuple[float, int, int, list[int]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{where} is not JSON ({str(error)[:80]}).") from error
    if not isinstance(row, dict):
        raise InvalidConfig(f"{where} must be a JSON object, got {line[:80]}.")
    at, ids = row.get("timestamp"), row.get("hash_ids")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e15:
        raise InvalidConfig(f"{where}: timestamp must be a number from 0, got {str(at)[:80]}.")
    prompt, output = (_tokens(row.get(name), name, where) for name in ("input_length", "output_length"))
    if ids is None:
        return float(at), prompt, output, []
    good = isinstance(ids, list) and all(type(each) is int and 0 <= each < IDS for each in ids)
    if not good or len(ids) != -(-prompt // BLOCK):
        raise InvalidConfig(
            f"{where}: hash_ids must be {-(-prompt // BLOCK)} numbers from 0, one for each {BLOCK} of {prompt} tokens."
        )
    return at / 1000, prompt, output, ids


def _tokens(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise InvalidConfig(f"{where}: {name} must be a number from 1 to {MOST_TOKENS}, got {str(value)[:80]}.")
    return value


def _pieces(ids: list[int], tokens: int, number: int, where: str) -> tuple[Piece, ...]:
    """Return a prompt's pieces: its blocks, or a content that no other has."""
    if not ids:
        return (Piece(IDS + 2 * number % IDS, tokens),)
    *whole, last = ids
    return (*(Piece(each, BLOCK) for each in whole), Piece(last, tokens - BLOCK * len(whole)))


def _seen(ids: list[int], seen: OrderedDict[int, None]) -> int:
    """Return the tokens of the first blocks that came before, and remember all blocks as the newest."""
    count = next((n for n, each in enumerate(ids) if each not in seen), len(ids))
    for each in reversed(ids):
        seen[each] = None
        seen.move_to_end(each)
    while len(seen) > KEPT_IDS:
        seen.popitem(last=False)
    return count * BLOCK
