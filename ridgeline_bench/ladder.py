"""The rungs of a kernel ladder: checked, then timed beside cuBLAS on a GPU; predicted without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.results import Record

LADDERS = ("gemm",)
SIZES = (4096, 8192)  # of M = N = K
OPERANDS = 4  # in turn, so that the cache holds none of them


@dataclass(frozen=True)
class RungTime:
    """A rung on one size: seconds measured (0: not), the least seconds, what sets those, and a fault ("": none)."""

    rung: str
    size: int
    least: float
    limiter: str
    seconds: float = 0.0
    error: str = ""

    @property
    def flops(self) -> float:
        """FLOPs of the product."""
        return 2.0 * self.size**3

    def record(self, base: Record) -> Record:
        """Return the time as a result in µs."""
        return Record(
            engine=base.engine, version=base.version, dtype=base.dtype, machine=base.machine, date=base.date,
            workload="ladder:gemm", metric=f"{self.size}³ [{self.rung}]", value=1e6 * self.seconds, unit="µs",
            limit=1e6 * self.least, samples=(1e6 * self.seconds,), options={"flops": self.flops},
        )  # fmt: skip


def ladder(name: str, device: torch.device, bench: Bench, cubins: Path | None = None) -> Iterator[RungTime]:
    """Yield cuBLAS and every rung of a ladder, at every size.

    cubins: a folder with the rungs' machine code, for a machine without a CUDA compiler.

    Raises InvalidConfig for an unknown ladder, or where the package is installed without its ladders.
    """
    if name not in LADDERS:
        raise InvalidConfig(f"there is no ladder {name!r}; choose one of: {', '.join(LADDERS)}.")
    if find_spec(f"ridgeline.kernels.{name}.ladder") is None:
        raise InvalidConfig(
            "the ladders are not in the wheel; clone the repository and install it with pip install -e ."
        )
    if device.type == "cuda":
        return (each for size in SIZES for each in _measured(size, bench, cubins))
    return (each for size in SIZES for each in _predicted(size))


def _predicted(size: int) -> Iterator[RungTime]:
    from ridgeline.kernels.gemm.ladder.predict import CHIPS, predict
    from ridgeline.kernels.gemm.ladder.rungs import RUNGS

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    chip = next((chip for chip in CHIPS if chip.name.split()[0] in name), CHIPS[0])
    for rung in RUNGS:
        found = predict(rung, chip, size, size, size)
        yield RungTime(rung.name, size, found.bound, found.limiter)


def _measured(size: int, bench: Bench, cubins: Path | None) -> Iterator[RungTime]:
    from ridgeline.kernels.gemm.ladder.run import LoadedRung, runs_here
    from ridgeline.kernels.gemm.ladder.rungs import RUNGS

    a, b = (torch.randn(OPERANDS, size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    exact = a[0].float() @ b[0].float().T

    def seconds(product: Callable[[Tensor, Tensor, Tensor], object]) -> float:
        return bench.seconds(*(lambda at=at: product(a[at], b[at], c) for at in range(OPERANDS)))

    yield RungTime("cuBLAS", size, 0.0, "", seconds(lambda x, y, out: torch.mm(x, y.T, out=out)))
    for rung, least in zip(RUNGS, _predicted(size), strict=True):
        if not runs_here(rung):
            continue
        product = LoadedRung(rung, cubins)
        c.fill_(torch.nan)
        product(a[0], b[0], c)
        error = _difference(c, exact)
        yield RungTime(rung.name, size, least.least, least.limiter, 0.0 if error else seconds(product), error)


def _difference(found: Tensor, exact: Tensor) -> str:
    """Return the fault in words, or "". bfloat16 rounds by 2**-8, and sums of normal numbers are off by far less."""
    bound = 2**-8 * exact.abs() + 2**-12 * exact.shape[-1] ** 0.5
    wrong = ~((found.float() - exact).abs() <= bound)
    return f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong" if wrong.any() else ""
