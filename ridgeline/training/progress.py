"""The output of a training run while it runs: a JSON line per report, and a progress bar or plain lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ridgeline.tracking import UNTRACKED, Tracker

_SECONDS_BETWEEN_LINES = 10.0

Row = dict[str, float | int | None]


class TrainingLog:
    """A log that appends rows to `path` and shows them: as a bar on a terminal, elsewhere as a line every ten seconds.
    A tracker gets them too, by names that begin with the title.

    Rows after the step `keep_to` are dropped first, because a resumed run writes them again.
    """

    def __init__(self, path: Path, console: Console, title: str, keep_to: int, tracker: Tracker = UNTRACKED) -> None:
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= keep_to]
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._console = console
        self._title, self._tracker = title, tracker
        self._last_line = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=1.0, text="")

    def write(self, row: Row, fraction: float) -> None:
        """Write one report. `fraction` is the share of the run that is done, 0..1."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._tracker.metrics(int(row["step"] or 0), {f"{self._title}/{k}": v for k, v in row.items() if k != "step"})
        mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        drawn = f"reward {row['reward']:.4f}  KL {row['kl']:.3g}  " if "reward" in row else ""
        text = f"step {row['step']}  {drawn}loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s{mfu}"
        self._progress.update(self._task, completed=min(fraction, 1.0), text=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(f"{self._title}  {min(fraction, 1.0):4.0%}  {text}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
