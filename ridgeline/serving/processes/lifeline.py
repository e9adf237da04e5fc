"""The duties of a server's process to the supervisor that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

READY = "ready"  # the line on standard output that says that the process works
LAST = signal.SIGUSR1  # tells an API server that the server ends at once: it answers whoever still waits
MISTAKE = 2  # exit code of a process that was asked for something impossible
MISTAKEN = "mistake: "  # begins the line on standard output that says what was impossible


def end_with_parent() -> None:
    """Let this process die as soon as standard input closes. The parent holds the other end and never writes again, so
    it closes when the parent is gone, however that ended."""
    threading.Thread(target=_watch, daemon=True).start()


def tell_ready() -> None:
    """Say that this process works from now on."""
    with suppress(OSError):
        os.write(1, f"{READY}\n".encode())


def tell_mistake(sentence: object) -> NoReturn:
    """End this process, because something impossible was asked for."""
    with suppress(OSError):
        os.write(1, f"{MISTAKEN}{' '.join(str(sentence).splitlines())}\n".encode(errors="replace"))
    sys.exit(MISTAKE)


def _watch() -> None:
    os.read(0, 1)
    os._exit(1)
