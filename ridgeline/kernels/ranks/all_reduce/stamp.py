"""A note of the device's own time, at a place in a stream or in a graph.

Legend:
    N  notes that memory has room for
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import INTERPRETED


def stamp(notes_N2: Tensor, count_1: Tensor, what: int) -> None:
    """Note (the time in nanoseconds, what) and count it. The newest N notes stay. Both tensors are int64."""
    stamp_kernel[(1,)](notes_N2, count_1, what, N=notes_N2.shape[0], ASM=not INTERPRETED, num_warps=1)


@triton.jit(do_not_specialize=["what"])
def stamp_kernel(notes_ptr, count_ptr, what, N: tl.constexpr, ASM: tl.constexpr):
    """Write one note. Without ASM its time is its number."""
    count = tl.load(count_ptr)
    if ASM:
        time = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,l", [count], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        time = count
    at = (count % N) * 2
    tl.store(notes_ptr + at, time)
    tl.store(notes_ptr + at + 1, what.to(tl.int64))
    tl.store(count_ptr, count + 1)


AOT = (
    AotKernel(
        stamp_kernel,
        {"notes_ptr": "*i64", "count_ptr": "*i64", "what": "i64"},
        {"N": 4096, "ASM": True},
        num_warps=1,
        archs=("sm_90",),
    ),
)
