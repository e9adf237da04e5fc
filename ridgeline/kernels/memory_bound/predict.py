"""The least time of a rung, by arithmetic: bytes over rates, and what else stands in its way.

The rates are the machine's best; waiting for bytes is not in the model, so a naive rung is slower than its bound, and
the difference is what the next rung gains by more bytes on their way.
"""

from __future__ import annotations

import sys

from ridgeline.kernels.cuda.predict import CHIPS, WARP, Chip, Prediction
from ridgeline.kernels.memory_bound.launches import MatrixShape, item
from ridgeline.kernels.memory_bound.rungs import RUNGS, THREADS, MemoryRung

SECTOR = 32  # bytes: what L2 is asked for and given at least
LINE = 128
ATOMICS = 1.0  # a clock cycle, to one address
READS = {"vector_add": 2, "silu_multiply": 2}  # numbers that are read for one; else 1
SLOW_FUNCTIONS = {"softmax": 2, "silu": 2, "silu_multiply": 2}  # ex2 and rcp a number, of 16 a cycle


def bytes_of(op: str, shape: MatrixShape) -> int:
    """Return the bytes that must go from and to memory: inputs once and outputs once, weights of norms too."""
    numbers = shape.numbers * (READS.get(op, 1) + (op != "reduction"))
    vectors = {"layer_norm": 2, "rms_norm": 1}.get(op, 0) * shape.columns
    return item(op) * (numbers + vectors)


def moved(rung: MemoryRung, shape: MatrixShape) -> int:
    """Return the bytes that the rung moves from and to memory: results in the middle too."""
    middle = {"silu": 3, "silu_multiply": 5}.get(rung.op, 0) if rung.launches > 1 else 0
    return bytes_of(rung.op, shape) + middle * shape.numbers * item(rung.op)


def predict(rung: MemoryRung, chip: Chip, shape: MatrixShape) -> Prediction:
    """Return the least seconds of each resource for a rung."""
    size, cycles = item(rung.op), chip.multiprocessors * chip.clock
    reads = READS.get(rung.op, 1) * rung.passes + (rung.op in ("layer_norm",)) * 2 * (rung.kind != "stays")
    across = shape.numbers * size * (reads + (rung.op != "reduction"))
    seconds = {"memory": moved(rung, shape) / chip.bandwidth}
    if rung.kernel == "transpose":
        seconds["shared memory"] = transpose_wavefronts(rung) / WARP * shape.numbers / cycles
        across = shape.numbers * (size + (SECTOR if rung.name == "naive" else size))
    seconds["L2"] = across / chip.l2
    if rung.kind == "adds":
        together = 1 if rung.name == "atomic" else THREADS * rung.own  # numbers of one atomic
        seconds["atomics"] = shape.numbers / together / ATOMICS / chip.clock
    if slow := SLOW_FUNCTIONS.get(rung.op, 0):
        seconds["exponentials"] = slow * shape.numbers / chip.exponentials / cycles
    return Prediction(seconds)


def transpose_wavefronts(rung: MemoryRung) -> float:
    """Return the wavefronts of shared memory for 32 numbers, which are stored and loaded; 0 where there is none."""
    return {"naive": 0.0, "shared_tile": 1.0 + 32.0}.get(rung.name, 2.0)


def transpose_table(shape: MatrixShape) -> list[str]:
    """Return the lines of the page's table: what the turned side of each transpose costs."""
    lines = [
        "| rung | sectors that a warp's store fills | bytes to L2 a number | wavefronts of a warp's load | "
        + " | ".join(f"{chip.name}, least µs" for chip in CHIPS) + " | limit |",
        "|---|---:|---:|---:|" + "---:|" * len(CHIPS) + "---|",
    ]  # fmt: skip
    for rung in (each for each in RUNGS if each.op == "transpose"):
        naive = rung.name == "naive"
        found = [predict(rung, chip, shape) for chip in CHIPS]
        loads = "none" if naive else f"{transpose_wavefronts(rung) - 1:.0f}"
        sectors, sent = (WARP, SECTOR) if naive else (WARP * 4 // SECTOR, 4)
        times = " | ".join(f"{1e6 * each.bound:,.0f}" for each in found)
        limits = " / ".join(dict.fromkeys(each.limiter for each in found))
        lines.append(f"| `{rung.name}` | {sectors} | {sent} | {loads} | {times} | {limits} |")
    return lines


def table(shape: MatrixShape) -> list[str]:
    """Return the lines of the page's table of all rungs for 256 MB of input: bytes moved, least times, limits."""
    lines = ["| op | rung | MB from and to memory | " + " | ".join(f"{chip.name}, least µs" for chip in CHIPS)
             + " | limit |", "|---|---|---:|" + "---:|" * len(CHIPS) + "---|"]  # fmt: skip
    for rung in RUNGS:
        own = MatrixShape(shape.rows // (item(rung.op) // 2), shape.columns)
        found = [predict(rung, chip, own) for chip in CHIPS]
        times = " | ".join(f"{1e6 * each.bound:,.0f}" for each in found)
        limits = " / ".join(dict.fromkeys(each.limiter for each in found))
        size = f"{moved(rung, own) / (1 << 20):,.0f}"
        lines.append(f"| {rung.op} | {rung.number} `{rung.name}` | {size} | {times} | {limits} |")
    return lines


if __name__ == "__main__":
    print(
        "\n".join(
            transpose_table(MatrixShape(8192, 8192)) if "transpose" in sys.argv else table(MatrixShape(32768, 4096))
        )
    )
