"""A rank's trace by torch's profiler, with ranges where notes are made: segments, and collectives in them.

The notes of a rank (`Stamps`) begin and end where a reader of a trace wants names, so the ranges come from there. While
no trace is taken a note costs one test more, and a rank without notes costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline.parallel.stamps import KINDS, Arrived, Stamps


class TracedStamps:
    """Notes that are ranges too, in torch's profiler and (CUDA) as NVTX, while `begin` … `end` take a trace.

    stamps: which makes the notes. file: the trace to write.
    """

    def __init__(self, stamps: Stamps, file: Path, device: torch.device) -> None:
        self._stamps, self._file, self._cuda = stamps, file, device.type == "cuda"
        self._profiler: Any = None
        self._open: list[Any] = []

    def stamp(self, what: int) -> None:
        self._stamps.stamp(what)
        if self._profiler is not None:
            self._range(KINDS[what >> 1 & 0x7FFF], end=bool(what & 1))

    def take(self) -> Arrived:
        return self._stamps.take()

    def now(self) -> int:
        return self._stamps.now()

    def begin(self) -> None:
        """Begin a trace. No step may be under way."""
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * self._cuda
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=config)
        self._profiler.start()

    def end(self) -> Path:
        """Write the trace, and return its file. No step may be under way."""
        profiler, self._profiler = self._profiler, None
        if self._cuda:
            torch.cuda.synchronize()
        profiler.stop()
        profiler.export_chrome_trace(str(self._file))
        return self._file

    def _range(self, name: str, *, end: bool) -> None:
        if not end:
            opened = torch.profiler.record_function(name)
            opened.__enter__()
            self._open.append(opened)
            if self._cuda:
                torch.cuda.nvtx.range_push(name)
        elif self._open:  # it may have begun before the trace
            if self._cuda:
                torch.cuda.nvtx.range_pop()
            self._open.pop().__exit__(None, None, None)
