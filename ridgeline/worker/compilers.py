"""Processes that compile an engine's kernels while the engine loads its weights.

Compiling a kernel takes half a second, a model needs a hundred of them, and Triton compiles one at a time in a process.
The processes are started afresh: a fork of a process that uses a GPU breaks, and `multiprocessing` would run the user's
script once more.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ridgeline.core.cores import available
from ridgeline.kernels.base.aot import Compiled
from ridgeline.worker.graphs import Progress
from ridgeline.worker.precompile import KernelSet

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8  # with more, each would spend longer importing torch than compiling
PATIENCE = 300  # seconds; a process that takes longer is taken to hang, since any model's kernels compile faster
# -P: no file in the user's folder may stand in for a module
CHILD = (sys.executable, "-P", "-c", "from ridgeline.worker.precompile import child; child()")


def processes_needed(kernels: KernelSet) -> int:
    """Return the number of processes worth starting: none if all kernels are compiled, if Triton would not use
    the result, or if there are few cores."""
    import triton

    knobs = triton.knobs
    if knobs.runtime.interpret or knobs.compilation.always_compile or kernels.marker.exists():
        return 0
    processes = min(MOST_PROCESSES, available() // 2)
    return processes if processes > 1 else 0


class Compilers:
    """The processes that compile, as a context manager. Leaving it ends those that still run.

    with Compilers(kernels, processes) as compilers:
        ...  # other work
        compilers.finish()
    """

    def __init__(self, kernels: KernelSet, processes: int) -> None:
        self._kernels, self._processes = kernels, processes
        self._children: dict[Path, subprocess.Popen[bytes]] = {}  # the file of a process's output → the process
        self._cleanup = ExitStack()

    def __enter__(self) -> Compilers:
        try:
            if self._processes:
                temporary = TemporaryDirectory(prefix="ridgeline-", ignore_cleanup_errors=True)
                folder = Path(self._cleanup.enter_context(temporary))
            for number in range(self._processes):
                self._start(folder, folder / f"{number}.out")
        except OSError as error:
            logger.warning("of %d processes to compile kernels one did not start (%s)", self._processes, error)
        except BaseException:  # such as Ctrl-C
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._children.values():
            process.kill()
        for process in self._children.values():
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        self._cleanup.close()

    def finish(self, progress: Progress | None = None) -> Compiled:
        """Wait until all kernels are compiled, and leave the marker that says so. Raises RuntimeError if a process
        failed."""
        deadline, done, failure = time.monotonic() + PATIENCE, Compiled(), ""
        for number, (output, process) in enumerate(self._children.items()):
            if progress is not None:
                progress("compiling kernels", number / len(self._children))
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"one was not done after {PATIENCE} s") from None
            if process.returncode != 0:  # the others go on: what they compile is found all the same
                said = output.with_suffix(".err").read_text(errors="replace").strip()
                failure = f"one ended with {process.returncode}: {said[-2000:]}"
                continue
            report = json.loads(output.read_text().splitlines()[-1])
            done |= Compiled(**{name: set(keys) for name, keys in report.items()})
        if failure:
            raise RuntimeError(failure)
        if self._children:
            self._kernels.marker.touch()
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
            logger.info("%d kernels compiled by %d processes, waited %.1f s for", len(done.fresh), number, waited)

    def _start(self, folder: Path, output: Path) -> None:
        import triton

        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            "TRITON_CACHE_DIR": triton.knobs.cache.dir,
            "CUDA_VISIBLE_DEVICES": "",  # the GPU is the engine's alone
            "HIP_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
            # In a session of its own Ctrl-C does not reach the process: it ends with this one, without a traceback
            process = subprocess.Popen(
                CHILD, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
            )
        self._children[output] = process
        assert process.stdin is not None
        pickle.dump((self._kernels, folder), process.stdin)
        process.stdin.flush()
