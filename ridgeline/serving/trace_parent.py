"""The name of a request, and the trace that it is part of (W3C Trace Context), by its client's headers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from contextvars import ContextVar

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # may stand in a log and in a header
HEADERS = ("traceparent", "tracestate")
LONGEST = 8192  # characters; a longer header is nonsense

_current: ContextVar[dict[str, str]] = ContextVar("trace_parent")


def name_of(given: str | None) -> str:
    """Return the request's name: the one that its client gave, if that is harmless, or a new one."""
    return given if given and SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def take(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the trace's headers for all that this task, and those it starts, will run."""
    _current.set(
        {
            name.lower(): value
            for name, value in headers
            if name.lower() in HEADERS and isinstance(value, str) and len(value) <= LONGEST
        }
    )


def current() -> dict[str, str]:
    """Return the headers that were set, or none."""
    return _current.get({})
