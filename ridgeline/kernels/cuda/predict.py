"""The least time of a rung of a ladder, by arithmetic: each resource's work over its rate, and the slowest of them.

The rates are the machine's best; waiting is not in the model. So a prediction is a bound from below, and a rung that
gains by hiding latency shows that gain in its measured time alone.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MMA_SHARE = 0.63  # assumed: of the tensor cores' rate, what mma.sync and WMMA get on Hopper


@dataclass(frozen=True)
class Chip:
    """Rates of a GPU. `bandwidth` and `l2` are B/s, `clock` Hz, `matrix` FLOP/s of dense bfloat16.

    That of L2 is assumed: measurements of others lie between 5 and 10 TB/s, and ours on an H200 are 5.7, or 7.9 where
    four blocks read the same (docs/kernels/micro.md). A multiprocessor issues `lanes` lanes of
    instructions a cycle, and computes `exponentials` of base 2.
    """

    name: str
    bandwidth: float
    l2: float = 10e12
    clock: float = 1.98e9
    multiprocessors: int = 132
    matrix: float = 989.4e12
    lanes: int = 128
    exponentials: int = 16


CHIPS = (Chip("H100 SXM", 3.35e12), Chip("H200", 4.8e12))


@dataclass(frozen=True)
class Prediction:
    """Seconds of each resource for one problem. The largest is the rung's bound."""

    seconds: dict[str, float]

    @property
    def limiter(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def bound(self) -> float:
        """The least seconds that the problem can take."""
        return self.seconds[self.limiter]


def chip_here(device: str) -> Chip:
    """Return the chip that a device's name begins with, or the first one."""
    return next((chip for chip in CHIPS if chip.name.split()[0] in device), CHIPS[0])
