"""The least time of a rung of the attention ladder: each resource's work over its rate, and the slowest of them.

Besides, the time of a tile whose products and whose softmax take turns: the sum of both. A rung that overlaps them
comes near the least time, and one that does not near that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.attention.ladder.rungs import BACKWARD_RUNGS, RUNGS, AttentionRung, BackwardRung
from ridgeline.kernels.cuda.predict import CHIPS, Chip, Prediction

POLYNOMIAL = 8  # instructions of a lane for an exponential by `ideas.exp2_polynomial`: its shift and sum are one


@dataclass(frozen=True)
class WholeShape:
    """The shape of a problem: `batch` sequences of `length` tokens with `heads` heads of `size` channels, and `groups`
    heads of keys (0: as many)."""

    batch: int = 4
    heads: int = 48
    length: int = 8192
    size: int = 128
    groups: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees."""
        return self.batch * self.heads * self.length * (self.length + 1) / 2

    @property
    def flops(self) -> float:
        """FLOPs that the result needs: two products."""
        return 4 * self.size * self.pairs

    def __str__(self) -> str:
        return f"{self.length:,} tokens, {self.batch} x {self.heads} heads of {self.size}"


def computed(rung: AttentionRung, shape: WholeShape) -> float:
    """Return the pairs that a rung computes: those of all tiles that it visits."""
    if rung.whole:
        return float(shape.batch * shape.heads * shape.length**2)
    ends = (min(row + rung.rows, shape.length) for row in range(0, shape.length, rung.rows))
    visited = sum(min(rung.rows, shape.length) * -(-end // rung.columns) * rung.columns for end in ends)
    return float(shape.batch * shape.heads * visited)


def predict(rung: AttentionRung, chip: Chip, shape: WholeShape) -> Prediction:
    """Return the least time of a rung."""
    pairs, cycles = computed(rung, shape), chip.multiprocessors * chip.clock
    tensors = shape.batch * shape.length * shape.size * (2 * shape.heads + 2 * (shape.groups or shape.heads)) * 2
    lanes = rung.softmax + (1 - rung.exponentials) * POLYNOMIAL + rung.rescaled * shape.size / rung.columns
    if not rung.tensor:
        lanes += 2 * shape.size
    seconds = {
        "memory": (tensors + rung.memory * pairs) / chip.bandwidth,
        "L2": 4 * shape.size * pairs / rung.rows / chip.l2 * rung.bits / 16,
        "exponentials": rung.exponentials * pairs / chip.exponentials / cycles,
        "instructions": (lanes + rung.exponentials) * pairs / chip.lanes / cycles,
    }
    if rung.tensor:
        seconds["tensor cores"] = 4 * shape.size * pairs / chip.matrix * rung.bits / 16
    return Prediction(seconds)


def in_turns(found: Prediction) -> float:
    """Return the seconds where products and the softmax take turns, but are not behind memory."""
    softmax = max(found.seconds["exponentials"], found.seconds["instructions"])
    return max(found.bound, found.seconds.get("tensor cores", 0.0) + softmax)


def predict_backward(rung: BackwardRung, chip: Chip, shape: WholeShape) -> Prediction:
    """Return the least time of gradients of q, k and v, pairs that are seen counted alone.

    Each pair costs 8 D / 128 bytes of L2: q and the output's gradient once for 128 keys, and besides keys and values
    once for 128 queries (two kernels), or the sums of gradients of q in float32 (one).
    """
    pairs, cycles = shape.pairs, chip.multiprocessors * chip.clock
    tensors = shape.batch * shape.length * shape.size * (4 * shape.heads + 4 * (shape.groups or shape.heads)) * 2
    return Prediction({
        "memory": tensors / chip.bandwidth,
        "L2": 8 * shape.size * pairs / 128 / chip.l2,
        "exponentials": rung.exponentials * pairs / chip.exponentials / cycles,
        "instructions": (rung.softmax + rung.exponentials) * pairs / chip.lanes / cycles,
        "tensor cores": 2 * rung.products * shape.size * pairs / chip.matrix,
    })  # fmt: skip


def backward_table(sizes: tuple[int, ...] = (64, 128)) -> list[str]:
    """Return the lines of the page's table of gradients, for an H200."""
    chip = CHIPS[-1]
    lines = ["| rung | idea | " + " | ".join(f"D {size}: least ms | in turns | limit" for size in sizes) + " |"]
    lines.append("|---|---|" + "---:|---:|---|" * len(sizes))
    for rung in BACKWARD_RUNGS:
        found = [predict_backward(rung, chip, WholeShape(size=size)) for size in sizes]
        cells = [f"{1e3 * x.bound:,.2f} | {1e3 * in_turns(x):,.2f} | {x.limiter}" for x in found]
        lines.append(f"| `{rung.name}` | {rung.idea} | {' | '.join(cells)} |")
    return lines


def table(sizes: tuple[int, ...] = (64, 128)) -> list[str]:
    """Return the lines of the page's table, for an H200."""
    chip = CHIPS[-1]
    lines = ["| rung | idea | " + " | ".join(f"D {size}: least ms | in turns | limit" for size in sizes) + " |"]
    lines.append("|---|---|" + "---:|---:|---|" * len(sizes))
    for rung in RUNGS:
        cells = []
        for size in sizes:
            found = predict(rung, chip, WholeShape(size=size))
            cells += [f"{1e3 * found.bound:,.2f}", f"{1e3 * in_turns(found):,.2f}", found.limiter]
        lines.append(f"| {rung.number} `{rung.name}` | {rung.idea} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*table(), "", *backward_table()]))
