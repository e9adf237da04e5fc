"""The outcome of one request. Times are seconds since the start that all client processes share."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of one request.

    It was to leave at `due`. A place under --max-concurrency was there at `free` (otherwise the same). It left at
    `sent`, and its answer was complete, or had failed, at `end`. Tokens arrived at `moments`, `counts` of them each
    time. `error` is "" or the kind of failure, and `message` its words. `exact` means that `counts` are the server's
    and not guessed from pieces.
    """

    index: int
    due: float
    free: float
    sent: float
    end: float
    asked_tokens: int
    moments: list[float] = []
    counts: list[int] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    exact: bool = True
    error: str = ""
    message: str = ""

    @property
    def late(self) -> float:
        """The delay that was the client's own fault."""
        return self.sent - self.free

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """The mean time per token after the first arrival; None if nothing came after it."""
        if len(self.moments) < 2:
            return None
        return (self.moments[-1] - self.moments[0]) / max(1, self.output_tokens - self.counts[0])

    @property
    def itls(self) -> list[float]:
        """The times between tokens, one per token after the first arrival. Tokens that arrive together share the
        wait."""
        found = []
        for before, now, count in zip(self.moments, self.moments[1:], self.counts[1:], strict=False):
            found += [(now - before) / count] * count
        return found


class Share(msgspec.Struct, kw_only=True):
    """The results of one client process. `busy` is the share of its core, 0 … 1."""

    outcomes: list[Outcome]
    busy: float
