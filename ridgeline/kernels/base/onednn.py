"""Matrices in oneDNN's own blocked layout, on a CPU: tensors whose memory only oneDNN can read (`is_mkldnn`)."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20  # bytes
FULL = 0.9  # of a large page, from which on it is worth its memory
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # from Linux's headers; it knows the second since 6.1


def num_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's memory, packed or not."""
    return torch.ops.mkldnn._nbytes(x) if x.is_mkldnn else x.untyped_storage().nbytes()


def address(x: Tensor) -> int:
    """Return the address of a tensor's memory, packed or not."""
    return torch.ops.mkldnn.data_ptr(x) if x.is_mkldnn else x.untyped_storage().data_ptr()


def in_large_pages(packed: Tensor) -> Tensor:
    """Ask Linux to move a packed matrix into pages of 2 MiB. Every step reads all weights from end to end, and looking
    up pages of 4 KiB takes a twentieth of that. If the system refuses, nothing is lost."""
    _ask_for_large_pages(address(packed), address(packed) + num_bytes(packed))
    return packed


def together_in_large_pages(packed: Sequence[Tensor]) -> None:
    """Do the same for matrices that are smaller than such a page, but lie one behind the other in memory.

    Packing may have left a hole before each of them, as large as itself. The allocator gives these back, and pages that
    have some are left small, since a large page has memory for all of itself.
    """
    if sys.platform == "linux" and (trim := getattr(_libc(), "malloc_trim", None)):  # glibc has it
        trim(0)
    filled: Counter[int] = Counter()  # page → bytes of matrices
    for x in packed:
        first, end = address(x), address(x) + num_bytes(x)
        for page in range(first // LARGE_PAGE, -(-end // LARGE_PAGE)):
            filled[page] += min(end, (page + 1) * LARGE_PAGE) - max(first, page * LARGE_PAGE)
    for page in sorted(page for page, size in filled.items() if size >= FULL * LARGE_PAGE):
        _ask_for_large_pages(page * LARGE_PAGE, (page + 1) * LARGE_PAGE)


def _ask_for_large_pages(first: int, end: int) -> None:
    """Ask for them for all that fills them between two addresses."""
    start = -(-first // LARGE_PAGE) * LARGE_PAGE
    length = (end - start) // LARGE_PAGE * LARGE_PAGE
    if length > 0 and sys.platform == "linux":
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
