"""Classes of what goes wrong in collectives of NCCL and gloo, by the words of their errors.

An error names the layer that gave up, on the rank that noticed; the fault is often elsewhere. NCCL's own classes are
those of `ncclResult_t`; what torch adds are limits of time and checks of tensors.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Failure(NamedTuple):
    """A class of failures, and its usual cause with what to do, as the end of a sentence."""

    name: str
    cause: str


# In this order: a message that names two is of the first, because torch repeats the original reason behind its own.
CLASSES = (
    (
        Failure("mismatch", "ranks brought tensors of unlike shapes or dtypes; all must run the same step"),
        r"doesn't match expected size|invalid tensor (size|type|shape)|collective mismatch|different dtypes"
        r"|LengthPerRank|Detected mismatch|must have the same (size|dtype|shape)",
    ),
    (
        Failure(
            "timeout", "another rank did not come in time; look for the one that hangs, is slow or runs other steps"
        ),
        r"Watchdog caught collective|timed out waiting|timed out|Timeout\(ms\)|wait timeout",
    ),
    (
        Failure("peer lost", "another rank's process or its network is gone; its own log says why"),
        r"closed by peer|reset by peer|Connection refused|Broken pipe|ncclRemoteError|remote process exited",
    ),
    (
        Failure(
            "cuda", "a call to CUDA failed below NCCL; look at the GPU (dmesg for Xid, nvidia-smi) and free memory"
        ),
        r"ncclUnhandledCudaError|unhandled cuda error",
    ),
    (
        Failure("system", "a call to the system failed: /dev/shm, locked memory, sockets; NCCL_DEBUG=WARN names it"),
        r"ncclSystemError|unhandled system error",
    ),
    (
        Failure("usage", "ranks share a GPU or call in another order; give each rank its own GPU"),
        r"ncclInvalidUsage|invalid usage|Duplicate GPU detected",
    ),
    (
        Failure("argument", "a tensor or rank is none that NCCL takes: on another device, not contiguous, of no ranks"),
        r"ncclInvalidArgument|invalid argument",
    ),
    (
        Failure("communicator", "the group is used before it was joined or after it ended; start new processes"),
        r"has not been initialized|process group twice|communicator was aborted|Invalid process group"
        r"|already (been )?(aborted|destroyed)",
    ),
    (
        Failure("internal", "NCCL found itself wrong, mostly after a lost link or unlike versions; NCCL_DEBUG=INFO"),
        r"ncclInternalError|internal error",
    ),
)
LIBRARY = re.compile(r"nccl|gloo|process ?group|c10d|tensors with different dtypes|Operation timed out!", re.IGNORECASE)
SOURCE = r"\.(?:cc|cpp|cu|h|hpp):\d+"  # how the path of a library's own line ends
NAMED = re.compile(rf"'[^'\s]+'|\"[^\"\s]+\"|(?!\S*{SOURCE})\S*/\S*")  # what a user named, and any other path


def failure_of(error: BaseException | str) -> Failure | None:
    """Return the class of a collective's error, or None for errors of anything else, such as those of a model in a
    folder that is called after a library."""
    text = str(error)
    if not LIBRARY.search(NAMED.sub(" ", text)):
        return None
    return next((found for found, words in CLASSES if re.search(words, text, re.IGNORECASE)), None)


def described(error: BaseException) -> str:
    """Return an error in words: its type and its own, and for a collective's its class."""
    words, found = f"{type(error).__name__}: {error}", failure_of(error)
    return words if found is None else f"{words} [collective, {found.name}: {found.cause}]"
