"""Functions of sealed children that misbehave."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any


def escaping() -> Callable[[Any, Any], Any]:
    """A function that tries one way out of a sealed process, by name, and returns what came of it."""
    ways: dict[str, Callable[[], object]] = {
        "network": socket.socket,
        "local": lambda: socket.socket(socket.AF_UNIX),
        "pair": socket.socketpair,
        "read": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "write": lambda: os.open("/tmp/written-by-a-sealed-process", os.O_WRONLY | os.O_CREAT),
        "list": lambda: os.listdir("/"),
        "fork": os.fork,
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "signal": lambda: os.kill(os.getppid(), 0),
        "thread": lambda: threading.Thread(target=int).start(),
        "memory": lambda: os.memfd_create("x"),
    }

    def run(name: Any, _: Any) -> Any:
        try:
            ways[name]()
        except (OSError, RuntimeError) as error:
            return type(error).__name__
        return "it worked"

    return run


def crashing() -> Callable[[Any, Any], Any]:
    """A function that ends its process as a broken decoder would, or takes all its time or memory."""

    def run(name: Any, _: Any) -> Any:
        if name == "crash":
            os._exit(139)
        if name == "time":
            while True:
                pass
        if name == "memory":
            return len(bytearray(1 << 40))
        return os.getpid()

    return run
