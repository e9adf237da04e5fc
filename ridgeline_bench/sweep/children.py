"""Work on a GPU in child processes, so that a kernel that hangs or breaks the device costs one task and no more; and
the compilation that goes ahead of it, in many processes: `python -m ridgeline_bench.sweep.children FILE` is a child.

Tasks and functions are pickled, so they are values and functions of modules.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch

from ridgeline.kernels.base.aot import compiling_for
from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline_bench.sweep.runs import one_child, target

T = TypeVar("T")
Answer = Callable[[Any], dict[str, Any]]
_DRAWN = torch.randn
START, SILENCE = 60.0, 60.0  # seconds after which a child that has said nothing, at first and later, hangs


class Compiled(NamedTuple):
    """kernels: that were compiled, and were not known before. failures: sentences. seconds: that it took."""

    kernels: int
    failures: list[str]
    seconds: float


def answers(tasks: Sequence[T], answer: Answer, until: float = float("inf")) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yield each task with its answer, a dictionary of JSON's types, as children give them one after the other. The
    answer of a task over which a child broke is {"failed": why}. until: the time of `time.monotonic` to end at."""
    pending = dict(enumerate(tasks))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pending"
        while pending and time.monotonic() < until:
            path.write_bytes(pickle.dumps((pending, answer)))
            command = [sys.executable, "-W", "ignore", "-m", "ridgeline_bench.sweep.children", str(path)]
            for found in one_child(command, len(pending), until, START, SILENCE):
                number = found.get("number", next(iter(pending), None))
                if number in pending:
                    said = {name: value for name, value in found.items() if name not in ("number", "broken")}
                    yield pending.pop(number), said


def compiled(tasks: Sequence[T], launch: Callable[[T], object], processes: int) -> Compiled:
    """Launch all tasks on tensors without memory, for this machine's GPU (or an H200), and so compile each of their
    kernels once. What fails here will fail again where it is launched."""
    started, (arch, processors) = time.monotonic(), target()
    share = max(1, len(tasks) // (16 * processes))
    parts = [tasks[i : i + share] for i in range(0, len(tasks), share)]
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = [pool.submit(_compile, part, launch, arch, processors, Path(claims)) for part in parts]
        found = [future.result() for future in futures]
    failures = [failure for _, failed in found for failure in failed]
    return Compiled(sum(kernels for kernels, _ in found), failures, time.monotonic() - started)


def _compile(
    tasks: Sequence[T], launch: Callable[[T], object], arch: str, processors: int, claims: Path
) -> tuple[int, list[str]]:
    settle_cache_keys()
    failures = []

    def claim(kernel: str) -> bool:
        try:
            (claims / sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    with compiling_for(arch, processors, claim) as done, torch.inference_mode(), patch.object(torch, "randn", _randn):
        for task in tasks:
            try:
                launch(task)
            except Exception as error:
                failures.append(f"not compiled: {task}: {type(error).__name__}: {error}"[:300])
    return len(done.fresh), failures


def _randn(*shape: Any, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    """Return random numbers, or none where tensors have no memory: there torch imports its compiler for them, which
    takes seconds."""
    if torch.device(options.get("device") or "cpu").type == "meta":
        return torch.empty(*shape, **options)
    return _DRAWN(*shape, generator=generator, **options)


def main(path: Path) -> None:
    """Answer the tasks in a file, a line for each, until one breaks the device."""
    pending, answer = pickle.loads(path.read_bytes())  # which the parent wrote
    settle_cache_keys()
    for number, task in pending.items():
        torch.manual_seed(0)
        try:
            found = answer(task)
            broken = False
        except Exception as error:
            found, broken = {"failed": f"{type(error).__name__}: {error}"[:600], "broken": True}, True
        print("\n" + json.dumps({"number": number, **found}), flush=True)
        if broken:
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
