"""Progress bars on standard error, shown only if someone is looking."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def counted(text: str = "{task.description}", *more: ProgressColumn) -> Progress:
    """Return a bar with a text and what is done out of all, and further columns."""
    return _bar(TextColumn(text), BarColumn(), MofNCompleteColumn(), *more)


def _bar(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


class _Bar:
    """A bar that is shown inside a `with`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class LoadingBar(_Bar):
    """`with LoadingBar() as bar: bar("loading weights", 0.4)`."""

    def __init__(self) -> None:
        super().__init__(_bar(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")))
        self._task = self._bar.add_task("loading", total=1.0)

    def __call__(self, what: str, fraction: float) -> None:
        self._bar.update(self._task, description=what, completed=fraction)


class TokenBar(_Bar):
    """`with TokenBar("scoring", 5000) as advance: advance(100)`: tokens done out of all."""

    def __init__(self, what: str, num_tokens: int) -> None:
        super().__init__(counted("{task.description}", TimeElapsedColumn(), TimeRemainingColumn()))
        self._task = self._bar.add_task(what, total=num_tokens)

    def __call__(self, tokens: int) -> None:
        self._bar.update(self._task, advance=tokens)


class BatchBar(_Bar):
    """Completions done out of all, and output tokens per second so far."""

    def __init__(self, num_completions: int) -> None:
        speed = TextColumn("{task.fields[speed]}")
        super().__init__(counted("generating", speed, TimeElapsedColumn(), TimeRemainingColumn()))
        self._task = self._bar.add_task("generating", total=num_completions, speed="")
        self._tokens = 0
        self._started = time.perf_counter()

    def advance(self, new_tokens: int, *, finished: bool) -> None:
        self._tokens += new_tokens
        speed = self._tokens / max(1e-9, time.perf_counter() - self._started)
        self._bar.update(self._task, advance=int(finished), speed=f"{speed:,.0f} tokens/s")


class NoBar:
    """A stand-in for a BatchBar that is not shown: making one takes longer than a short request."""

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def advance(self, new_tokens: int, *, finished: bool) -> None: ...


def batch_bar(num_completions: int, *, shown: bool) -> BatchBar | NoBar:
    return BatchBar(num_completions) if shown and sys.stderr.isatty() else NoBar()
