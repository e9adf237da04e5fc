"""Processes that are ranks of one kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(module: str, count: int, folder: Path, what: str) -> None:
    """Call `rank(number, count, folder, what)` of a test module in a process for each number, and wait until all have
    ended well."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"from pathlib import Path; from {module} import rank; import sys; "
    code += f"rank(int(sys.argv[1]), {count}, Path({str(folder)!r}), {what!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(n)], env=environment) for n in range(count)]
    try:
        assert [process.wait(120) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
