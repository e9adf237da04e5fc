"""Items of an answer (texts, reasoning, calls), sent while they are written. The whole answer has the same items as the
stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from msgspec import Raw

from ridgeline.text.parsers.events import CallDelta, Event

Item = dict[str, Any]
_Told = TypeVar("_Told")  # an event of the stream


class Items(ABC, Generic[_Told]):
    """The items of one answer, of which the last may be open: more of the same kind, or of the same call, belongs to
    it."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: object = None  # of a call its index, else the kind of what is written
        self._texts: list[str] = []

    def take(self, event: Event, logprobs: list[Raw] | None = None) -> Iterator[_Told]:
        """Yield the events for what the model wrote. `logprobs` are those of the tokens of a text."""
        kind = event.index if isinstance(event, CallDelta) else type(event)
        if kind != self._open:
            yield from self._close("completed")
            yield from self._begin(event)
            self._open, self._texts = kind, []  # only now: an answer that ends in between has no item to complete
        text = event.arguments if isinstance(event, CallDelta) else event.text
        if text:
            self._texts.append(text)
            if (told := self._grow(event, text, logprobs)) is not None:
                yield told

    def end(self, status: str = "completed") -> Iterator[_Told]:
        """Yield the events that end the answer."""
        return self._close(status)

    def _close(self, status: str) -> Iterator[_Told]:
        if self._open is not None:
            self._open = None
            yield from self._end(self.items[-1], "".join(self._texts), status)

    @abstractmethod
    def _begin(self, event: Event) -> Iterator[_Told]:
        """Add the item that an event begins."""

    @abstractmethod
    def _grow(self, event: Event, text: str, logprobs: list[Raw] | None) -> _Told | None:
        """Tell of more text of the last item, or None if it comes when it is whole."""

    @abstractmethod
    def _end(self, item: Item, text: str, status: str) -> Iterator[_Told]:
        """Complete the last item, whose whole text this is."""
