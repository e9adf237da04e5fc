"""Gluon under the names that this package uses: Triton 3.6 and 3.9 name some things differently."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # tensor box → shared
load_rows = (  # each thread's pointers → shared
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def viewed(tile, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of the same shared memory with another shape and layout."""
    if _PUBLIC:
        return tile.reinterpret(tile.dtype, shape, layout)
    else:
        return tile._reinterpret(tile.dtype, shape, layout)
