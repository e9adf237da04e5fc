"""The main program of a child of `Confined`: it sets the limits, then answers messages until its parent is gone.

python -m ridgeline.core.confined_child MODULE:FACTORY SECONDS MEMORY [sealed]
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Any

from ridgeline.core.confined import HEADER, encode
from ridgeline.core.sealed import seal

FEW = 32  # descriptors: the socket, shared memory, and files of modules that are loaded late
LINK = socket.socket(fileno=0)


class Caller:
    """The caller of a sealed child's function.

    data: the shared memory that came with the call, read-only.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.data = b"" if descriptor is None else _mapped(descriptor, mmap.ACCESS_READ)

    def ask(self, question: Any) -> tuple[Any, Any]:
        """Return the caller's answer, and the shared memory that came with it to be written, or None."""
        reply({"asks": question})
        message, descriptor = receive()
        if message is None:
            sys.exit()
        return json.loads(message), None if descriptor is None else _mapped(descriptor, mmap.ACCESS_WRITE)


def main() -> None:
    target, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    module, _, factory = target.partition(":")
    function = getattr(importlib.import_module(module), factory)()
    confine(memory)
    if sealed := sys.argv[4:] == ["sealed"]:
        seal()
    reply("ready")
    while True:
        message, descriptor = receive()
        if message is None:
            return
        allow_cpu(seconds)
        try:
            more = (Caller(descriptor),) if sealed else ()
            answer = encode({"result": function(json.loads(message), *more)})
        except MemoryError:
            reply({})
            return  # the memory that is left may be in pieces
        send(answer)
        del message, answer, more


def _mapped(descriptor: int, access: int) -> Any:
    size = os.fstat(descriptor).st_size
    try:
        return mmap.mmap(descriptor, size, access=access) if size else b""
    finally:
        os.close(descriptor)


def confine(memory: int) -> None:
    """Allow this process no more memory than this, no written files, few open ones, and no core dumps."""
    limit(resource.RLIMIT_AS, address_space() + memory)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, FEW)
    limit(resource.RLIMIT_CORE, 0)


def allow_cpu(seconds: float) -> None:
    """Bound the processor time. The parent counts time too; this bound works even if the parent is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with suppress(OSError, ValueError):  # not every system has every limit
        resource.setrlimit(kind, (most, most))


def address_space() -> int:
    """Return the bytes that this process has mapped."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def receive() -> tuple[bytes | None, int | None]:
    """Return a message and the file that came with it, or None for each. There is no message if the parent is gone."""
    header, descriptor = read(HEADER)
    if header is None:
        return None, None
    message, more = read(int.from_bytes(header))
    return message, descriptor if more is None else more


def read(count: int) -> tuple[bytes | None, int | None]:
    """Read this many bytes, and the file that comes with them. Return None if the parent is gone."""
    found, descriptor = bytearray(), None
    while len(found) < count:
        try:
            piece, files, *_ = socket.recv_fds(LINK, min(count - len(found), 1 << 20), 1)
        except ConnectionResetError:
            return None, None
        if not piece:
            return None, None
        descriptor = files[0] if files else descriptor
        found += piece
    return bytes(found), descriptor


def reply(value: Any) -> None:
    send(encode(value))


def send(message: bytes) -> None:
    LINK.sendall(message)


if __name__ == "__main__":
    main()
