"""A streamed answer as it arrives: when, and how many tokens each piece brought."""

from __future__ import annotations

from typing import Any

import msgspec

LIMIT = 8 << 20  # bytes of one event


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    text_output: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamFailed(Exception):
    """The stream has the wrong form. `kind` is a few words by which failures are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Stream:
    """A stream. `moments` and `counts` are those of every piece with tokens, side by side.

    `exact` means that the counts are the server's own (running usage, or token ids); otherwise each piece with text
    counts as one token. `ended` means that `[DONE]` has come, if the server's streams are `marked` so.
    """

    def __init__(self, *, marked: bool = True) -> None:
        self.moments: list[float] = []
        self.counts: list[int] = []
        self.exact = True
        self.ended = not marked
        self.failure: StreamFailed | None = None
        self.prompt_tokens = self.cached_tokens = 0
        self._reported = 0  # completion tokens by the server's usage
        self._rest = b""

    @property
    def output_tokens(self) -> int:
        """The output tokens as the server counts them, else as counted here."""
        return self._reported or sum(self.counts)

    def feed(self, data: bytes, at: float) -> None:
        """Take bytes that arrived at `at`. It never raises: what is wrong is kept in `failure`."""
        if self.failure is not None:
            return
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        try:
            for event in events:
                self._take(event, at)
            if len(self._rest) > LIMIT:
                raise StreamFailed("malformed", f"an event has more than {LIMIT} bytes")
        except StreamFailed as failure:
            self.failure = failure

    def _take(self, event: bytes, at: float) -> None:
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:  # a comment that keeps the connection alive
            return
        data = b"\n".join(lines)
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            found = _decode(data)
        except msgspec.MsgspecError as error:
            raise StreamFailed("malformed", f"{error}: {data[:200].decode(errors='replace')}") from error
        if found.error is not None:
            raise StreamFailed("stream error", _message(found.error))
        self._count(found, at)

    def _count(self, event: _Event, at: float) -> None:
        if (usage := event.usage) is not None:
            self.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        ids = [c.token_ids for c in event.choices if c.token_ids is not None]
        if ids:
            new = sum(map(len, ids))
        elif usage is not None and event.choices:
            new = usage.completion_tokens - self._reported
        else:
            new = sum(map(_has_text, event.choices)) + bool(event.text_output)
            self.exact &= not new
        if usage is not None:
            self._reported = usage.completion_tokens
        if new > 0:
            self.moments.append(at)
            self.counts.append(new)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta or _Delta()
    return bool(choice.text or delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
