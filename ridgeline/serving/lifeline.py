"""What a process of the server owes to the supervisor that started it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

READY = "ready"  # the line on standard output that says so


def end_with_parent() -> None:
    """Die as soon as standard input closes. The parent holds its other end and never writes again, so that is when
    the parent is gone, however it went."""
    threading.Thread(target=_watch, daemon=True).start()


def tell_ready() -> None:
    """Say that there is work done here from now on."""
    with suppress(OSError):
        os.write(1, f"{READY}\n".encode())


def _watch() -> None:
    os.read(0, 1)
    os._exit(1)
