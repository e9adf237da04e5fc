"""The least time of a rung, by arithmetic: each resource's work over its rate, and the slowest of them.

The rates are the machine's best; waiting is not in the model. So a prediction is a bound from below, and a rung that
gains by hiding latency shows that gain in its measured time alone. The work of a rung is data here, with its reason;
`tests/kernels/gemm/test_ladder.py` compares cycles of shared memory with what the emulator counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.cuda.predict import CHIPS, MMA_SHARE, WARP, Chip, Prediction
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung


@dataclass(frozen=True)
class RungWork:
    """The work of a rung for 32 FMAs, one of each lane of a warp.

    shared: cycles of the multiprocessor's L1 cache and shared memory, which give 128 bytes or look up one line in each.
    issued: instructions of a warp, of which a multiprocessor issues four a cycle (0: few).
    tensor: "" (CUDA cores), "mma" or "wgmma".
    """

    shared: float
    issued: float = 0.0
    tensor: str = ""


# A rung's shared cycles: loads of 16 bytes a lane take 4 cycles for a warp, since 128 bytes come in one.
WORK = {
    "naive": RungWork(32 + 1, 5),  # 32 lines of B and one of A; 2 loads, 2 widened numbers, 1 FMA
    "coalesced": RungWork(2, 5),
    "shared_tiles": RungWork(2 + (32 + 1) / 32, 2.25),  # besides: a tile is stored, B's by 32 lanes into one bank
    "register_tiles": RungWork(
        (8 + 16) / 64 + 2 * 16 / 128, 68 / 64
    ),  # 16 lanes store into one bank, and loads as in rung 5
    "vector_loads": RungWork((8 + 16) / 64 + 2 * 2 / 128, 68 / 64),  # B's two loads take twice their 4 cycles
    "conflict_free": RungWork(16 / 64 + 2 / 128, 68 / 64),
    "cp_async": RungWork(16 * 4 / 512, (512 + 128 + 16) / 512),  # 128 numbers are widened for 512 FMAs
    "wmma": RungWork((64 + 64) * 2 / 128 / (64 * 64 / WARP), tensor="mma"),  # 128 numbers for 4,096 FMAs
    "mma_sync": RungWork((64 + 64) * 2 / 128 / (64 * 64 / WARP), tensor="mma"),
    "wgmma_tma": RungWork((64 + 128) * 2 / 128 / (64 * 128 / WARP), tensor="wgmma"),
    "warp_roles": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
    "multicast": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
    "persistent": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
    "ping_pong": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
    "async_stores": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
    "shared_sums": RungWork((64 + 256) * 2 / 128 / (64 * 256 / WARP), tensor="wgmma"),
}


def predict(rung: Rung, chip: Chip, m: int, n: int, k: int, item: int = 2) -> Prediction:
    """Return the least time of C[m, n] = A[m, k] · B[n, k]ᵀ, whose operands have `item` bytes a number: 1, 2 or 4."""
    work, flops = WORK[rung.name], 2 * m * n * k
    groups = m * n * k / WARP / chip.multiprocessors / chip.clock  # seconds, at one cycle for 32 FMAs
    seconds = {
        "memory": (item * (m * k + n * k) + 2 * m * n) / chip.bandwidth,
        "L2": l2_bytes(rung, m, n, k) * item / 2 / chip.l2,
        "L1" if rung.depth == 0 else "shared memory": work.shared * groups * item / 2,
        "instructions": work.issued / 4 * groups,
    }
    if work.tensor:
        rate = chip.matrix * (MMA_SHARE if work.tensor == "mma" else 1) * 2 / item
        seconds["tensor cores"] = flops / rate
    else:
        seconds["FMA units"] = groups / 4
    return Prediction(seconds)


def l2_bytes(rung: Rung, m: int, n: int, k: int) -> float:
    """Return the bytes of 16-bit numbers that blocks fetch from L2: each operand once for each tile of the other."""
    rows, columns = rung.fetched
    return 2 * m * n * k * (1 / rows + 1 / columns)


def table(m: int = 4096, n: int = 4096, k: int = 4096) -> list[str]:
    """Return the lines of the page's table."""
    lines = ["| rung | tile | bytes from L2 | " + " | ".join(f"{c.name}, least µs" for c in CHIPS) + " | limit |"]
    lines.append("|---|---|---:|" + "---:|" * len(CHIPS) + "---|")
    for rung in RUNGS:
        found = [predict(rung, chip, m, n, k) for chip in CHIPS]
        limits = " / ".join(dict.fromkeys(each.limiter for each in found))
        times = " | ".join(f"{1e6 * each.bound:,.0f}" for each in found)
        tile = " x ".join(map(str, (*rung.tile, rung.depth) if rung.depth else rung.tile))
        size = f"{l2_bytes(rung, m, n, k) / 1e9:,.2f} GB"
        lines.append(f"| {rung.number} `{rung.name}` | {tile} | {size} | {times} | {limits} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
