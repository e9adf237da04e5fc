"""Gluon under the names that this package uses: Triton 3.6 and 3.9 name some things differently. Also here: what
all kernels for Hopper need.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # tensor box → shared
load_rows = (  # each thread's pointers → shared
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # for one partition's threads
if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add  # shared → added to a tensor box
else:

    @builtin
    def add_tile(desc, coordinates, source, _semantic=None):
        """Add a tile of shared memory to a tensor's box in memory, by the copy engine."""
        at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


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
