"""Conversion of a choice's text into content and tool calls, in OpenAI's shape."""

from __future__ import annotations

import uuid
from typing import Any

from ridgeline.text.tool_calls import CallDelta, HermesParser


class CallReader:
    """The reader of one choice. `most` bounds the calls it reports (None: no bound), and `found` says if there was
    one."""

    def __init__(self, most: int | None = None) -> None:
        self.found = False
        self._parser, self._most = HermesParser(), most

    def read(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return what a further piece of text adds: content, and one entry for each call with something new."""
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
