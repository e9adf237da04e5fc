"""Processes that are ranks of one kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tests import interpreter


def run_ranks(module: str, count: int, folder: Path, what: str) -> None:
    """Call `rank(number, count, folder, what)` of a test module in a process for each number, and wait until all have
    ended well."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "tests.kernels.ranks.ranks", module, str(count), str(folder), what]
    processes = [subprocess.Popen([*command, str(n)], env=environment) for n in range(count)]
    try:
        assert [process.wait(120) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    interpreter.patch_once()
    module, count, folder, what, number = sys.argv[1:]
    import_module(module).rank(int(number), int(count), Path(folder), what)
