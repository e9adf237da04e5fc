"""The duties of a server's process to the supervisor that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import msgspec

from ridgeline.serving.processes.pulse import Pulse

READY = "ready"  # the line on standard output that says that the process works
LAST = signal.SIGUSR1  # tells an API server that the server ends at once: it answers the clients that still wait
MISTAKE = 2  # exit code of a process that was asked for something impossible
MISTAKEN = "mistake: "  # begins the line on standard output that says what was impossible

_Settings = TypeVar("_Settings")


class GivenUp(msgspec.Struct):
    """A line of the supervisor's: this engine's process hangs, and is about to be ended. `why` continues "the engine
    …"."""

    process_id: int
    why: str


def read_settings() -> bytes:
    """Return the first line of standard input, and take nothing of what follows."""
    with open(0, "rb", buffering=0, closefd=False) as parent:
        return parent.readline()


class Parent:
    """The parent's messages after the settings: news for processes that send requests to engines."""

    def __init__(self) -> None:
        self._hear: Callable[[GivenUp], object] | None = None

    def listen(self, hear: Callable[[GivenUp], object]) -> None:
        """Call `hear` from now on, in a thread of its own."""
        self._hear = hear

    def watch(self) -> None:
        """Read until the end, and die then."""
        said = b""
        while piece := os.read(0, 1 << 12):
            *lines, said = (said + piece).split(b"\n")
            for line in lines:
                with suppress(msgspec.MsgspecError, RuntimeError):  # what is no news; and a loop that has closed
                    news = msgspec.json.decode(line, type=GivenUp)
                    if self._hear is not None:  # otherwise there is no request yet
                        self._hear(news)
        os._exit(1)


def begin(kind: type[_Settings]) -> tuple[_Settings, Pulse, Parent]:
    """Begin a process of the server. Return its settings, its pulse and its parent, with which it ends."""
    pulse = Pulse.of(sys.argv)
    pulse.start()
    settings = msgspec.json.decode(read_settings(), type=kind)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to every process, but the supervisor decides
    return settings, pulse, end_with_parent()


def end_with_parent() -> Parent:
    """Let this process die as soon as standard input closes. The parent holds the other end, so it closes when the
    parent is gone, however that ended."""
    parent = Parent()
    threading.Thread(target=parent.watch, daemon=True).start()
    return parent


def tell_ready() -> None:
    """Say that this process works from now on."""
    with suppress(OSError):
        os.write(1, f"{READY}\n".encode())


def tell_mistake(sentence: object) -> NoReturn:
    """End this process, because something impossible was asked for."""
    with suppress(OSError):
        os.write(1, f"{MISTAKEN}{' '.join(str(sentence).splitlines())}\n".encode(errors="replace"))
    sys.exit(MISTAKE)
