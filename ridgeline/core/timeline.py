"""The time from a process's start until its engine is ready, in stages.

Times are seconds of CLOCK_BOOTTIME, which all processes of a machine share, and in which the kernel notes when each of
them was started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the second where a system has no first
STAGE_SHOWN = 0.01  # seconds: shorter stages are left out of the line that is logged


def now() -> float:
    """Return the time in seconds since the machine was started."""
    return time.clock_gettime(CLOCK)


FIRST_IMPORT = now()  # of this package, which every process of ours imports before torch


def process_start() -> float:
    """Return the time at which this process was started, to a hundredth of a second, or that of its first import where
    the kernel does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
        return min(ticks / os.sysconf("SC_CLK_TCK"), FIRST_IMPORT)
    return FIRST_IMPORT


class StartStage(NamedTuple):
    """One stage. begin, end: seconds since the timeline's beginning."""

    name: str
    begin: float
    end: float


@dataclass
class Timeline:
    """The stages of a start, in the order in which they ended.

    began: the time at which the start began.
    """

    began: float = field(default_factory=now)
    stages: list[StartStage] = field(default_factory=list)

    @classmethod
    def of_process(cls, imported: float) -> Timeline:
        """Return a timeline that begins with this process. imported: when its imports were done. What a caller did
        between them and this moment is left out."""
        started = process_start()
        timeline = cls(now() - (imported - started))
        timeline.stages += [
            StartStage("python", 0.0, FIRST_IMPORT - started),
            StartStage("imports", FIRST_IMPORT - started, imported - started),
        ]
        return timeline

    @classmethod
    def of_child(cls, began: float | None) -> Timeline:
        """Return a timeline that began at `began` in another process, which then started this one. None: in this
        one."""
        started = process_start()
        timeline = cls(started if began is None else began)
        timeline.stages += [
            StartStage("command", 0.0, started - timeline.began),
            StartStage("python", started - timeline.began, FIRST_IMPORT - timeline.began),
        ]
        return timeline

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the body as a stage, even if it fails."""
        begin = now()
        try:
            yield
        finally:
            self.note(name, begin)

    def note(self, name: str, begin: float) -> None:
        """Note a stage that began at `begin`, by `now`, and ends at this moment."""
        self.stages.append(StartStage(name, begin - self.began, now() - self.began))

    @property
    def seconds(self) -> float:
        """The end of the last stage."""
        return max((stage.end for stage in self.stages), default=0.0)

    def __str__(self) -> str:
        """Return one line: the seconds of all, and of each stage."""
        told = [
            f"{stage.name} {stage.end - stage.begin:.2f}"
            for stage in sorted(self.stages, key=lambda stage: stage.begin)
            if stage.end - stage.begin >= STAGE_SHOWN
        ]
        return f"{self.seconds:.2f} s: {', '.join(told)}"
