"""A choice's text as content and tool calls, in OpenAI's shape."""

from __future__ import annotations

import uuid
from typing import Any

from ridgeline.text.tool_calls import CallDelta, HermesParser


class CallReader:
    """Of one choice. most: calls that are told, None for all. found: whether there was one."""

    def __init__(self, most: int | None = None) -> None:
        self.found = False
        self._parser, self._most = HermesParser(), most

    def read(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What a further piece of text tells: content, and what is new of calls, one entry for each."""
        deltas = self._parser.push(text) + (self._parser.finish() if ended else [])
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if isinstance(delta, CallDelta) and (self._most is None or delta.index < self._most):
                _add(calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}}), delta)
                self.found = True
        return "".join(delta for delta in deltas if isinstance(delta, str)), list(calls.values())


def _add(call: dict[str, Any], delta: CallDelta) -> None:
    if delta.name is not None:
        call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        call["function"] = {"name": delta.name, "arguments": ""}
    call["function"]["arguments"] += delta.arguments
