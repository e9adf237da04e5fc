"""Processes that compile an engine's kernels while the engine loads its weights.

Compiling a kernel takes half a second, a model needs a hundred of them, and Triton compiles one at a time in a process.
The processes are started afresh: a fork of a process that uses a GPU breaks, and `multiprocessing` would run the user's
script once more.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ridgeline.kernels.base.aot import Compiled
from ridgeline.worker.early import CompilerProcess, Early, processes_worthwhile
from ridgeline.worker.graphs import Progress
from ridgeline.worker.precompile import KernelSet

logger = logging.getLogger(__name__)

PATIENCE = 300  # seconds; a process that takes longer is taken to hang, since any model's kernels compile faster


def processes_needed(kernels: KernelSet, ahead: str | Path | None = None) -> int:
    """Return the number of processes worth starting: none if all kernels are compiled, if Triton would not use
    the result, or if there are few cores. ahead: a folder of kernels that were compiled ahead."""
    import triton

    knobs = triton.knobs
    places = [place for place in (knobs.cache.dir, ahead) if place is not None]
    if knobs.runtime.interpret or knobs.compilation.always_compile:
        return 0
    if any((Path(place) / kernels.marker).exists() for place in places):
        return 0
    return processes_worthwhile()


class Compilers:
    """The processes that compile, as a context manager. Leaving it ends those that still run.

    cache: the folder that they fill (default: Triton's own). early: processes that were started already, of which as
    many are taken as are needed.

    with Compilers(kernels, processes) as compilers:
        ...  # other work
        compilers.finish()
    """

    def __init__(
        self, kernels: KernelSet, processes: int, cache: Path | None = None, early: Early | None = None
    ) -> None:
        self._kernels, self._processes, self._own_cache, self._early = kernels, processes, cache, early
        self._children: list[CompilerProcess] = []
        self._cleanup = ExitStack()
        self._spent: dict[str, float] = {}  # the most seconds of a process, by what for

    def __enter__(self) -> Compilers:
        try:
            if self._processes:
                temporary = TemporaryDirectory(prefix="ridgeline-", ignore_cleanup_errors=True)
                folder = Path(self._cleanup.enter_context(temporary))
            for _ in range(self._processes):
                started = self._early.processes if self._early is not None else []
                self._children.append(started.pop() if started else CompilerProcess(self._cache))
                self._children[-1].send((self._kernels, folder))
        except OSError as error:
            logger.warning("of %d processes to compile kernels one did not start (%s)", self._processes, error)
        except BaseException:  # such as Ctrl-C
            self.__exit__()
            raise
        if self._early is not None:
            self._early.end()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.end()
        self._cleanup.close()

    def finish(self, progress: Progress | None = None) -> Compiled:
        """Wait until all kernels are compiled, and leave the marker that says so. Raises RuntimeError if a process
        failed."""
        deadline, done, failure = time.monotonic() + PATIENCE, Compiled(), ""
        for number, child in enumerate(self._children):
            if progress is not None:
                progress("compiling kernels", number / len(self._children))
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"one was not done after {PATIENCE} s") from None
            if child.process.returncode != 0:  # the others go on: what they compile is found all the same
                failure = f"one ended with {child.process.returncode}: {child.printed(errors=True)[-2000:]}"
                continue
            report = json.loads(child.printed().splitlines()[-1])
            spent = report.pop("spent")
            self._spent = {name: max(seconds, self._spent.get(name, 0.0)) for name, seconds in spent.items()}
            done |= Compiled(**{name: set(keys) for name, keys in report.items()}, seconds=spent["compiling"])
        if failure:
            raise RuntimeError(failure)
        if self._children:
            (self._cache / self._kernels.marker).touch()
        return done

    def try_to_finish(self, progress: Progress | None = None) -> None:
        """Wait as `finish` does, but only log a failure: a kernel that is missing is then compiled on first use, which
        takes longer."""
        started = time.perf_counter()
        try:
            done = self.finish(progress)
        except Exception as error:  # whatever the error is, the engine can do without these kernels
            logger.warning("processes that compile kernels failed; they are compiled on first use (%s)", error)
            return
        if self._children:
            waited, number = time.perf_counter() - started, len(self._children)
            longest = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())
            told = "%d kernels compiled by %d processes, waited %.1f s for; seconds of the longest: %s"
            logger.info(told, len(done.fresh), number, waited, longest)

    @property
    def _cache(self) -> Path:
        import triton  # here, because CPUs do without it

        return self._own_cache or Path(triton.knobs.cache.dir)
