"""Conversion of what a reader found in a choice's text into OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.text.parsers.events import CallDelta, Content, Event


@dataclass
class Said:
    """What a further piece of text adds: content, reasoning, and one entry for each call with something new."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Said:
        said, calls = cls(), dict[int, dict[str, Any]]()
        for event in events:
            if isinstance(event, CallDelta):
                _add(calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}}), event)
            elif isinstance(event, Content):
                said.content += event.text
            else:
                said.reasoning += event.text
        said.calls = list(calls.values())
        return said


def _add(call: dict[str, Any], delta: CallDelta) -> None:
    if delta.name is not None:
        call |= {"id": delta.id, "type": "function"}
        call["function"] = {"name": delta.name, "arguments": ""}
    call["function"]["arguments"] += delta.arguments
