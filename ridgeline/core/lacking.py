"""The errors by which a system says that it has no room. Nothing is wrong with the request, nor with the program."""

from __future__ import annotations

import errno

READ_ONLY = "its disk cannot be written any more"
LACKING = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its quota of the disk is used up",
    errno.EFBIG: "it may write no longer file (ulimit -f)",
    errno.EROFS: READ_ONLY,
    errno.EMFILE: "it has as many files and connections open as it may (ulimit -n)",
    errno.ENFILE: "the machine has as many files open as it may",
}


def lacking(error: BaseException | None) -> str | None:
    """Return the resource that the system lacks, as the end of "the server has no room: …", or None if this error is
    another."""
    return LACKING.get(error.errno or 0) if isinstance(error, OSError) else None
