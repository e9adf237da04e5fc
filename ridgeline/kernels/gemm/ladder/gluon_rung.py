"""The engine's own product in Gluon (hopper/stream.py) as a rung of the GEMM ladder, for Hopper.

One producer warp fills a ring by TMA, and two warpgroups multiply and store, as in rung 11; programs stay, as in rung
13, but take all tokens of a tile of weights one after the other. The engine uses it for up to 256 tokens, where a tile
is as wide as the tokens. Here it has rung 11's tile: 128 rows of B, which are the kernel's rows, by 256 of A.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.gemm.plain.hopper import aot, prepared, stream_kernel

CUT = Stream(rows=128, tokens=256, block=64, stages=4)


def gluon_product(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor) -> None:
    """Write A · Bᵀ to C. All are contiguous, of a 16-bit type and on one Hopper GPU."""
    (m, k), n = a_MK.shape, len(b_NK)
    on = prepared(CUT, a_MK, b_NK, None, a_MK)
    stream_kernel[(on.programs,)](
        on.x, on.weight, a_MK, c_MN, on.sums, on.arrivals, m, n, k, **on.named, BIAS=False, **on.options
    )


AOT = (aot(stream_kernel, CUT, "bf16", {}, {"BIAS": False, "GATE": ""}, "HGMMA"),)
