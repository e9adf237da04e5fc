"""Why rungs of the GEMM ladder take longer than their least times, or less: a line for each, for the ladder's page."""

from __future__ import annotations

REASONS = {
    "naive": "none: 33 cycles of L1 for 32 FMAs are what it takes",
    "coalesced": "L2 gives 5.5 TB/s to its 155 GB, not the 10 that are assumed",
    "shared_tiles": "not explained; a number for all lanes may cost less than a cycle of L1",
    "register_tiles": "two barriers for 16 numbers of K, behind which all warps wait for loads from L2",
    "vector_loads": "as rung 4; loads are wider, and the wait behind each barrier is the same",
    "conflict_free": "as rung 4: the less the work between two barriers takes, the more the wait is of it",
    "cp_async": "numbers are widened between loads and the FMAs that need them, which then wait",
    "wmma": "copies take a tenth of the cycles, and lower the clock by 8 %; products alone take 245",
    "mma_sync": "as rung 8: another layout of shared memory changes nothing, so banks are not the limit",
    "wgmma_tma": "one warpgroup waits for a stage, multiplies and gives it back: nothing runs while it waits",
    "warp_roles": "all blocks store at the same time, and then nothing multiplies; L2 gives less than 10 TB/s",
    "multicast": "blocks begin and end together, as in rung 11, and in pairs; power",
    "persistent": "both consumers store at once (5 % beside rung 15); power",
    "ping_pong": "tiles of 64 rows take 1.5 times rung 13's bytes from L2, which gives less than 10 TB/s",
    "async_stores": "power: at 1,500 MHz in place of 1,980 the tensor cores take 183 µs",
    "shared_sums": "128 blocks at a time end, exchange sums and store, while nothing multiplies; it is for few rows",
}

MICRO_REASONS: dict[str, str] = {}
