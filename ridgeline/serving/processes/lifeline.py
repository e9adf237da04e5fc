"""What a process of the server owes to the supervisor that started it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

READY = "ready"  # the line on standard output that says so
MISTAKE = 2  # exit code of a process that was asked for something impossible
MISTAKEN = "mistake: "  # begins the line on standard output that says what that was


def end_with_parent() -> None:
    """Die as soon as standard input closes. The parent holds its other end and never writes again, so that is when
    the parent is gone, however it went."""
    threading.Thread(target=_watch, daemon=True).start()


def tell_ready() -> None:
    """Say that there is work done here from now on."""
    with suppress(OSError):
        os.write(1, f"{READY}\n".encode())


def tell_mistake(sentence: object) -> NoReturn:
    """End, as something impossible was asked for."""
    with suppress(OSError):
        os.write(1, f"{MISTAKEN}{' '.join(str(sentence).splitlines())}\n".encode(errors="replace"))
    sys.exit(MISTAKE)


def _watch() -> None:
    os.read(0, 1)
    os._exit(1)
