"""The command line in this process: another would import torch for seconds, to tell of a mistake at once."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from unittest.mock import patch

from ridgeline import cli


@contextmanager
def own_logging() -> Iterator[None]:
    """Logging as a process finds it at its start, and afterwards as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def run_here(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """What `ridgeline arguments` prints and the code it ends with."""
    command = ["ridgeline", *(os.fsdecode(a) if isinstance(a, bytes) else str(a) for a in arguments)]
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(buffer, "utf-8", write_through=True) for buffer in written)
    code: object = 0
    with ExitStack() as stack:
        stack.enter_context(own_logging())
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.enter_context(patch.object(sys, "argv", command))
        stack.enter_context(patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")))
        stack.enter_context(patch.object(cli, "_discard_output"))  # it closes the process's own standard output
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
    texts = [buffer.getvalue().decode(errors="replace") for buffer in written]
    return subprocess.CompletedProcess(command, int(str(code or 0)), *texts)
