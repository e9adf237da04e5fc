"""Ranks as forks of a process of its own, which has one thread when it is forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forks of a process that has imported torch")


def forked(size: int, rank: Callable[[int], None]) -> None:
    """Run a function on so many ranks, each a fork of this process. Raise SystemExit if one fails."""
    children = []
    for number in range(size):
        if child := os.fork():
            children.append(child)
            continue
        try:
            rank(number)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        os._exit(0)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit(f"a rank of {size} failed")


def run_apart(module: str, folder: Path, seconds: float) -> None:
    """Run `forks(folder)` of a module of tests in a process of its own, which must end well within so many seconds."""
    code = f"import sys; from pathlib import Path; from {module} import forks; forks(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
