"""Trace files: one JSON object a line, each of which is a request that a client made.

    timestamp        seconds; requests leave as far apart as these are, unless a rate is given
    input_length     tokens of a random prompt; or
    prompt           text, token ids, or a chat's messages
    output_length    tokens of the answer

Lengths that a line leaves out are drawn from --input-len and --output-len.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig

NUMBERS = {"timestamp": (int, float), "input_length": (int,), "output_length": (int,)}


def read(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the file's rows in order of time. Raise InvalidConfig, naming file and line, for a line that is no
    request."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read the trace {str(path)!r} ({error}).") from error
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise InvalidConfig(f"the trace {str(path)!r} has no requests.")
    return tuple(sorted(rows, key=lambda row: row.get("timestamp", 0.0)))


def timed(rows: tuple[dict[str, Any], ...]) -> bool:
    """Return True if every row has a timestamp."""
    return all("timestamp" in row for row in rows)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidConfig(f"{where} is not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise InvalidConfig(f"{where} must be a JSON object, got {line[:80]}.")
    for name, kinds in NUMBERS.items():
        value = row.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < (0 if name == "timestamp" else 1):
            raise InvalidConfig(f"{where}: {name} must be a positive number, got {value!r}.")
    if not isinstance(row.get("prompt", ""), (str, list)):
        raise InvalidConfig(f"{where}: prompt must be text, token ids or messages, got {row['prompt']!r}.")
    return row
