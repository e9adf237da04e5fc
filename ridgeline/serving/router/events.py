"""Streams in whole events, so that one which breaks off ends with an error that its reader understands."""

from __future__ import annotations

from starlette.types import Scope

from ridgeline.serving.errors import RequestFailed
from ridgeline.serving.http.errors import body_for
from ridgeline.serving.http.paths import is_anthropics, is_under, route_path
from ridgeline.serving.http.sse import EventStream, Lines, MessageEvents, NamedEvents, nowhere

LONGEST = 64 << 10  # bytes of an event that are held until it is whole; a longer one is passed on in parts
EVENTS, LINES = b"text/event-stream", b"application/x-ndjson"


class WholeEvents:
    """Pieces of a stream, in whole events. The part of an event that came last is held until its rest comes: its reader
    could not use it before."""

    def __init__(self, kind: bytes) -> None:
        self.form = kind.partition(b";")[0].strip().lower()
        self._ends = (b"\n\n", b"\r\n\r\n") if self.form == EVENTS else (b"\n",) if self.form == LINES else ()
        self._rest = b""
        self._parted = False  # an event that has not ended was passed on in part

    @property
    def in_events(self) -> bool:
        return bool(self._ends)

    def add(self, piece: bytes) -> bytes:
        """Return the events that are whole by now."""
        if not self._ends:
            return piece
        data = self._rest + piece if self._rest else piece
        if any(data.endswith(end) for end in self._ends):
            self._rest, self._parted = b"", False
            return data
        cut = max((at + len(end) for end in self._ends if (at := data.rfind(end)) >= 0), default=0)
        self._parted = self._parted and not cut
        if len(data) - cut > LONGEST:
            cut, self._parted = len(data), True
        self._rest = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """Return the rest where a stream ended as its server meant it to."""
        return self._rest

    def failed(self, failure: RequestFailed, scope: Scope) -> bytes | None:
        """Return the event for a failure, in the form of the API that was asked, or None for an answer that is no
        stream of events. An event that was passed on in part is ended before it."""
        if not self._ends:
            return None
        body, path = body_for(failure, scope), route_path(scope)
        stream: type[EventStream] = EventStream
        if self.form == LINES:
            stream = Lines
        elif is_anthropics(path):
            stream = MessageEvents
        elif is_under("/v1/responses", path):
            stream = NamedEvents
        end = self._ends[0] if self._parted else b""
        return end + stream(nowhere).failed(body)
