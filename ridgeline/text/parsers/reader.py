"""The reader of one answer. A model's text goes in, cut anywhere, and content, reasoning and calls come out.

    reader = AnswerReader([ThinkParser(), HermesParser()])
    events = reader.read(piece, ended=False)

Joined events never depend on the cuts.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ridgeline.text.parsers.events import CallDelta, Content, Event
from ridgeline.text.parsers.scanner import Scanner


class Parser(Protocol):
    """One stage of reading. It takes text in pieces and returns events, whose content is the next stage's text."""

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after a further piece of text."""

    def finish(self) -> list[Event]:
        """Return the events that were held back. No more text comes."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class AnswerReader:
    """The reader of one choice. Without stages it returns all text as content.

    most: calls beyond so many are dropped (None: there is no bound).
    forced: the whole answer is held to calls, so text that is none is the start of one that was cut off, and dropped.
    new_id: makes the id of a call whose text names none.
    found_calls: there was a call.
    waiting: the characters since the last event.
    reasoning_tokens: the tokens of the reasoning, without those of its tags, if `read` is given tokens.
    """

    def __init__(
        self,
        stages: Sequence[Parser] = (),
        *,
        most: int | None = None,
        forced: bool = False,
        new_id: Callable[[], str] = call_id,
    ) -> None:
        self.found_calls = False
        self._stages, self._most, self._forced, self._new_id = tuple(stages), most, forced, new_id
        first = self._stages[0] if self._stages else None
        self._scanner = first if isinstance(first, Scanner) and first.reasons else None
        self._pending: deque[int] = deque()  # where tokens begin that are not counted yet
        self._begun, self._thinking, self._turned = 0, False, 0
        self.reasoning_tokens = self.waiting = 0

    @property
    def plain(self) -> bool:
        """True if all text is content."""
        return not self._stages

    def read(self, text: str, *, ended: bool, tokens: Sequence[int] = ()) -> list[Event]:
        """Return the events that a further piece of text adds. `ended` says that it is the last. `tokens` are the
        lengths of the texts that its tokens brought."""
        events: Iterable[Event] = [Content(text)] if text else []
        for stage in self._stages:
            events = _through(stage, events, ended)
        if self._scanner is not None:
            self._count(self._scanner, tokens, ended)
        self.waiting = 0 if events else self.waiting + len(text)
        return [found for event in events if (found := self._checked(event)) is not None]

    def _count(self, scanner: Scanner, tokens: Sequence[int], ended: bool) -> None:
        """Count the tokens that began within the reasoning, up to the last place where the scanner is sure."""
        for length in tokens:
            self._pending.append(self._begun)
            self._begun += length
        known = self._begun + 1 if ended else scanner.position
        while self._pending and self._pending[0] < known:
            place = self._pending.popleft()
            while self._turned < len(scanner.turns) and scanner.turns[self._turned][0] <= place:
                self._thinking = scanner.turns[self._turned][1]
                self._turned += 1
            self.reasoning_tokens += self._thinking

    def _checked(self, event: Event) -> Event | None:
        if not isinstance(event, CallDelta):
            return None if self._forced and isinstance(event, Content) else event
        if self._most is not None and event.index >= self._most:
            return None
        self.found_calls = True
        return event if event.name is None or event.id is not None else replace(event, id=self._new_id())


def _through(stage: Parser, events: Iterable[Event], ended: bool) -> list[Event]:
    """Return the events after a further stage has read their content."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Content):
            found += stage.push(event.text)
        else:
            found.append(event)
    return found + stage.finish() if ended else found
