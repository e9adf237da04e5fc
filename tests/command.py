"""The command line in this process: another would import torch for seconds, to tell of a mistake at once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from ridgeline.cli import main


def run_here(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """What `ridgeline arguments` prints and the code it ends with."""
    command = ["ridgeline", *(os.fsdecode(a) if isinstance(a, bytes) else str(a) for a in arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    code: object = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", command),
        patch.object(sys, "stdin", given),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="replace"))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(command, int(code or 0), *texts)  # type: ignore[call-overload]
