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

MICRO_REASONS = {
    "levels":
    "shared memory is faster than predicted: this kernel loads the address itself, and adds nothing to it. 8 "
    "GB cost 10 cycles more than 512 MB, so that translations of addresses are found in a cache of that "
    "reach. With 40 MB each half of L2 lacks what does not fit it, which is as others saw on GH200.",
    "partitions":
    "distances differ by 45 to 50 cycles, not by 100. So a line that is far is kept near as well, which fits "
    "the result with 40 MB. What is left is the way to one of many slices.",
    "coalescing":
    "memory is read by 64 bytes, as predicted, and a stride of 32 words costs a fifth more: of each line of "
    "128 bytes it takes one half, and whole lines come at a better rate.",
    "warps":
    "a vote starts once in a cycle, as a shuffle does, and not twice. redux is slower than a load from shared "
    "memory, but three times as fast as five shuffles.",
    "register_cache":
    "56 FMAs, six shuffles and eight other instructions make 70 for eight sums, and four a cycle take 2.2 "
    "cycles: instructions are the limit, not FMAs. Beside shared memory the register cache is 3.3 times as "
    "fast.",
    "lds":
    "of eight numbers that gfx1100 knows to be aligned, clang 22 makes loads of 12 and 4 bytes and two of two "
    "words: the sum reads them from both ends, and its scheduler takes them apart. On gfx942 it does not.",
    "waves":
    "arithmetic was right, and the number of registers was not: a sum that reads its neighbour keeps old "
    "values and addresses, so that 40 numbers take 66 registers, 100 take 168, and 190 take 369 with those "
    "for sums. By the registers that the compiler says, `ridgeline kernels occupancy` gives all of its "
    "figures.",
    "amd_products":
    "operands of later products are loaded early, which takes six registers more on gfx942, and 29 more on "
    "gfx1100, whose operands are four times as large.",
    "rates":
    "L2 gives 5.7 TB/s to blocks that read different pieces, 1.3 times the rate of memory. Where four blocks "
    "read the same pieces at the same time it is 7.9, so that requests are answered together. Others' figure "
    "is that of shared pieces. The GEMM ladder assumes 10 TB/s, which only tiles come near that neighbours "
    "share.",
    "bulk_copies":
    "the engine adds some 35 cycles to a load from L2, not 300: a bulk copy of bytes in a row needs no map. "
    "16 KB take 152 cycles more than 128 bytes, 107 bytes a cycle, so that a multiprocessor alone gets more "
    "than 64. With 64 KB under way in each all of them get 34 bytes a cycle, 1.5 times what loads get; with "
    "16 KB under way it is half of that, since one thread starts all copies. Figures in TB/s are those of the "
    "check, and mean nothing.",
    "parallel_fma":
    "warps and chains are not the same, which no count of FMAs shows. A chain of its own reads two operands "
    "from one bank of registers, and has half the rate in 32 warps as well; with the factor in the "
    "instruction it is 1.8 times as fast. Chains beside each other leave operands for reuse. The loop takes a "
    "tenth and more of the rest.",
    "bytes_in_flight":
    "a load takes 415 ns with little under way and 625 ns with 16 KB, not 350 at all times, so that the rate "
    "lags behind. More threads are worth 5 to 20 % more than more loads of each, whose turn ends when the "
    "last of them has come.",
    "atomics":
    "L2 adds 0.7 numbers a cycle to one address, and adding up in a warp first is 32 times as fast, as "
    "predicted. 32 neighbouring addresses are 9 times as fast as one, not 16, and an address for each thread "
    "420 times. Shared memory is twice as fast as predicted: one lane a cycle at one address, and a warp a "
    "cycle where all differ.",
    "divergence":
    "a warp walks one way after the other, whichever lanes take them. Two, four and eight ways take twice, "
    "four and eight times as long as one. The loop takes half a cycle of each, so that two ways by halves of "
    "a warp are 15.5 % above their prediction.",
    "launches":
    "a dependent launch saves 1 µs in a stream, since the next blocks are there already, and a quarter in a "
    "graph. 132 blocks of 1,024 threads start as fast as one of 32. A call through ctypes costs the host 15 "
    "µs, which is why times here are those of graphs or of the device.",
    "cluster_memory":
    "the neighbour's shared memory is at two thirds of L2's distance and gives 16.7 bytes a cycle, as "
    "predicted.",
    "mma_sync":
    "half the depth takes 0.65 of the time, not all of it. Eight warps reach 54 % of the tensor cores with "
    "eight products each, and four warps 45 %: 30 cycles of a product are then not hidden. fp8 has the rate "
    "of 16 bits, since it is widened. f64 needs the shape that is new in Hopper.",
    "wgmma":
    "shared memory is the limit below N = 64, as predicted, and one warpgroup loses 3 to 11 % at the end of "
    "each batch of 16, which a second one fills. A from registers is no way around it: without the moves it "
    "is as fast as from shared memory at N = 64, and 1.3 to 1.4 times as fast below.",
}  # fmt: skip
