"""The main program of a child of `Confined`: it sets the limits, then answers messages until its parent is gone.

python -m ridgeline.text.confined_child MODULE:FACTORY SECONDS MEMORY
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
from contextlib import suppress
from typing import Any

from ridgeline.text.confined import HEADER, encode

FEW = 32  # descriptors: the pipes, and files of modules that are loaded late


def main() -> None:
    target, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    module, _, factory = target.partition(":")
    function = getattr(importlib.import_module(module), factory)()
    confine(memory)
    reply("ready")
    while (message := receive()) is not None:
        allow_cpu(seconds)
        try:
            answer = encode({"result": function(json.loads(message))})
        except MemoryError:
            reply({})
            return  # the memory that is left may be in pieces
        send(answer)
        del message, answer


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


def receive() -> bytes | None:
    header = read(HEADER)
    return None if header is None else read(int.from_bytes(header))


def read(count: int) -> bytes | None:
    """Read this many bytes. Return None if the parent is gone."""
    found = bytearray()
    while len(found) < count:
        piece = os.read(0, min(count - len(found), 1 << 20))
        if not piece:
            return None
        found += piece
    return bytes(found)


def reply(value: Any) -> None:
    send(encode(value))


def send(message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    main()
