"""Matrices in oneDNN's own blocked layout, on a CPU: tensors whose memory only oneDNN can read (`is_mkldnn`)."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20  # bytes
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
    first = -(-address(packed) // LARGE_PAGE) * LARGE_PAGE
    length = address(packed) + num_bytes(packed) - first
    if length >= LARGE_PAGE and sys.platform == "linux":
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
    return packed


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
