"""Gluon under the names that this package uses: Triton 3.6 and 3.9 name some things differently. Also here: what
all kernels for Hopper need.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # tensor box → shared
load_rows = (  # each thread's pointers → shared
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # for one partition's threads
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def viewed(tile, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of the same shared memory with another shape and layout."""
    if _PUBLIC:
        return tile.reinterpret(tile.dtype, shape, layout)
    else:
        return tile._reinterpret(tile.dtype, shape, layout)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr = 1):
    """Return `number` barriers in shared memory, each of which waits for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars
