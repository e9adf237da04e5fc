"""Conversion of what a reader found in a choice's text into OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.serving.http.answers import FunctionDelta, ToolCallDelta
from ridgeline.text.parsers.events import CallDelta, Content, Event


class Said:
    """The sum of what some text says: content, reasoning, and one entry for each call with something new."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[list[CallDelta], list[str]]] = {}

    def add(self, events: Iterable[Event]) -> Said:
        for event in events:
            if isinstance(event, CallDelta):
                heads, arguments = self._calls.setdefault(event.index, ([], []))
                if event.name is not None:
                    heads.append(event)
                arguments.append(event.arguments)
            else:
                (self._content if isinstance(event, Content) else self._reasoning).append(event.text)
        return self

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCallDelta]:
        """The calls as a stream tells them. Those whose beginning was told before have neither id nor name."""
        found = []
        for index, (heads, arguments) in self._calls.items():
            call = ToolCallDelta(index=index, function=FunctionDelta(arguments="".join(arguments)))
            if heads:
                call.id, call.type, call.function.name = heads[0].id or "", "function", heads[0].name or ""
            found.append(call)
        return found
