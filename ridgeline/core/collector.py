"""Python's garbage collector, where it would only cost time.

Importing torch makes a million objects that stay, and a collector visits them again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Run the body without garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """Take what was made so far, modules and schemas, out of the garbage collector's sight. It stays as long as the
    process, and to visit it takes a full collection longer than everything that requests bring."""
    gc.collect()
    gc.freeze()
