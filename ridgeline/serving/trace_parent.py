"""The trace that a request is part of, by its client's headers (W3C Trace Context), on the way to its run."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

HEADERS = ("traceparent", "tracestate")
LONGEST = 8192  # characters; a longer header is nonsense

_current: ContextVar[dict[str, str]] = ContextVar("trace_parent")


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
