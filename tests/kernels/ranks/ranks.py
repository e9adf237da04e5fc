"""Processes that are ranks of kernels in Triton's interpreter.

One process imports torch and the kernels, and the ranks are forks of it: importing takes longer than what a rank does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests import interpreter
from tests.forks import forking


def run_ranks(module: str, count: int, folder: Path, *whats: str) -> None:
    """Call `rank(number, count, folder, what)` of a test module in a process for each number, for one `what` after the
    other, and wait until all have ended well."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "tests.kernels.ranks.ranks", module, str(count), str(folder), *whats]
    with forking(), subprocess.Popen(command, env=environment, start_new_session=True) as first:
        try:
            assert first.wait(120) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)


def run_rank(rank: Callable[..., None], number: int, count: int, folder: Path, whats: Sequence[str]) -> None:
    """End this process with 0 if the rank does all that it should."""
    code = 1
    try:
        for what in whats:
            rank(number, count, folder, what)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    interpreter.patch_once()
    module, count, folder, *whats = sys.argv[1:]
    rank, children = import_module(module).rank, list[int]()
    for number in range(int(count)):
        child = os.fork()
        if child == 0:
            run_rank(rank, number, int(count), Path(folder), whats)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(int(any(ended)))


if __name__ == "__main__":
    main()
