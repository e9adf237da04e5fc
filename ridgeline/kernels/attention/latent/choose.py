"""The cuts of latent attention's kernel, by the shapes of heads and the device.

A program holds the queries of M (token, head) pairs, and their sums, M x L in float32: 64 x 512 take half of a
multiprocessor's registers, so that is the most. Its tile of keys is its tile of values too.

Legend:
    M  queries of a program (tokens times heads)
    L  width of a latent
    W  the numbers that are kept of a token
"""

from __future__ import annotations

import torch
import triton

from ridgeline.kernels.attention.paged.triton_common import Cut
from ridgeline.kernels.base.launch import compute_capability, shared_memory

MOST_QUERIES = 64  # also what `make_schedule` should be told as `item_queries`


def choose(queries: int, rank: int, width: int, itemsize: int, device: torch.device) -> Cut:
    """Return the cut for items or tiles of so many queries. The cut must not depend on anything else of the step, or
    deterministic results would depend on what runs beside a request."""
    least = min(MOST_QUERIES, max(16, triton.next_power_of_2(queries)))
    padded = triton.next_power_of_2(rank)
    if padded > 512:  # which no known model has: as little as can be
        return Cut(16, 16, warps=8, stages=1)
    if itemsize > 2:  # no tensor cores; queries of 32 bits fill the shared memory
        return Cut(16, 16, warps=4 if padded < 512 else 8, stages=1)
    if torch.version.hip is not None:
        return Cut(min(least, 32), 16 if padded > 256 else 32, warps=4, stages=1)
    if compute_capability(device)[0] != 9:  # products of single warps, which have 16 rows
        keys = 32 if shared_memory(device) >= 2 * 2 * 32 * width + (32 << 10) else 16
        return Cut(min(least, 32), keys, warps=8, stages=2)
    # Measured on an H100. The sums of many queries leave few registers, and some are spilled; smaller tiles of keys,
    # which would spare these, take a third longer. On an H200 these are also the best of three for latents of 8 bits.
    return Cut(least, 64, warps=8, stages=2 if least == 64 else 3)
