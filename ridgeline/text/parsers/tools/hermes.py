"""Tool calls in the text of a model, in the form that Hermes and Qwen models were taught:

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ridgeline.text.parsers.events import CallDelta, Content, Event

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = re.compile(f"{OPEN}|{CLOSE}")
# Everything up to an object of arguments. It has no "<", so that it never reaches beyond a tag.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\<]|\\[^<])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class HermesParser:
    """A parser that takes text in pieces and returns content and calls. Joined, they are the same however the
    text was cut.

    Arguments are passed on as the model writes them, as soon as the call's name is known and they prove to be an
    object. A call in another order or form waits for its end. Text that is no call is content, tags included. White
    space after a call is dropped.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._text = ""  # not returned yet
        self._step: Callable[[list[Event]], bool] = self._content
        self._depth, self._quoted, self._escaped = 0, False, False  # the place within the arguments

    def push(self, text: str) -> list[Event]:
        self._text += text
        found: list[Event] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Event]:
        """Return the text that was held back, as it stands. No more text comes."""
        step, rest = self._step, self._text
        self._step, self._text = self._content, ""
        if step == self._head:
            return [self._whole(rest) or Content(OPEN + rest)]
        return [Content(rest)] if rest and step == self._content else []

    # Each of these reads what it can of the text, and returns True if the next one may go on.

    def _content(self, found: list[Event]) -> bool:
        content, tag, rest = self._text.partition(OPEN)
        if not tag:
            held = _begun(content, OPEN)
            content, rest = content[: len(content) - held], content[len(content) - held :]
        if content:
            found.append(Content(content))
        self._text = rest
        if tag:
            self._step = self._head
        return bool(tag)

    def _head(self, found: list[Event]) -> bool:
        head = HEAD.match(self._text)
        name = _value(head[1]) if head else None
        if head and isinstance(name, str):
            found.append(CallDelta(self.calls, name))
            self._text = self._text[head.end() :]
            self._depth, self._step = 0, self._arguments
            return True
        body, tag, rest = self._text.partition(CLOSE)
        if not tag:
            return False
        call = self._whole(body)
        found.append(call or Content(OPEN + body + CLOSE))
        self._text, self._step = rest, self._gap if call else self._content
        return True

    def _arguments(self, found: list[Event]) -> bool:
        end, complete = self._scan()
        if end:
            found.append(CallDelta(self.calls, arguments=self._text[:end]))
            self._text = self._text[end:]
        if complete:
            self.calls += 1
            self._step = self._tail
        return complete

    def _tail(self, found: list[Event]) -> bool:
        """Read from the end of the arguments to the end of the call, or to the next call if the model forgot the
        tag."""
        tag = TAG.search(self._text)
        if tag is None:
            self._text = self._text[len(self._text) - max(_begun(self._text, OPEN), _begun(self._text, CLOSE)) :]
            return False
        self._text, self._step = self._text[tag.end() :], self._head if tag[0] == OPEN else self._gap
        return True

    def _gap(self, found: list[Event]) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._content
        return bool(self._text)

    def _scan(self) -> tuple[int, bool]:
        """Return how many characters belong to the arguments, and if they end there.

        Outside of strings JSON has no "<", so broken arguments end at the next tag at the latest.
        """
        for place, char in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1, True
            elif char == "<":
                return place, True
        return len(self._text), False

    def _whole(self, body: str) -> CallDelta | None:
        """Return a call that is written in full, in whatever order, or None if it is no call."""
        value = _value(body)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        return CallDelta(self.calls - 1, value["name"], text)


def _begun(text: str, tag: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
