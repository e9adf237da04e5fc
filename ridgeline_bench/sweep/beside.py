"""`ridgeline kernels bench`: an op by classes of shapes, beside the machine's limit and the library.

The classes are those that the tuner keeps cuts for, or for other ops the shapes of real models. What the platform gets
is checked and timed as in a sweep, and so is the library: the vendor's product where the op is one, else torch, and
other projects' kernels where they are installed (peers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.gemm.plain.choose import LibraryProduct
from ridgeline.kernels.ops import OPS
from ridgeline_bench.sweep.children import answers
from ridgeline_bench.sweep.pairs import Pair
from ridgeline_bench.sweep.peers import PEERS
from ridgeline_bench.sweep.sweep import short


@dataclass(frozen=True)
class Timed:
    """The times of a case. us: by the name of what ran; "" is what the platform gets. failed: the same of what did not
    run or was wrong. nbytes, flops: the least work."""

    pair: Pair
    limit_us: float
    nbytes: float
    flops: float
    us: dict[str, float]
    failed: dict[str, str]

    @property
    def own_us(self) -> float | None:
        return self.us.get("")

    @property
    def fastest_peer(self) -> tuple[str, float] | None:
        """The name and the µs of the fastest of the others, or None."""
        others = [(us, name) for name, us in self.us.items() if name]
        return (min(others)[1], min(others)[0]) if others else None


def pairs_of(op: str, case: str = "") -> list[Pair]:
    """Return the pairs of an op. case: a part of their labels. Raises InvalidConfig if there are none."""
    if op not in OPS:
        raise InvalidConfig(f"there is no op {op!r}; known: {', '.join(OPS)}.")
    cuts, cases = OPS[op].cuts(), OPS[op].cases()
    classes: Sequence[OpCase] = cuts.tuning.classes if cuts is not None and cuts.tuning is not None else ()
    found = [Pair(op, one) for one in classes or cases.real or cases.swept if case in one.label]
    if not found:
        raise InvalidConfig(f"op {op} has no shapes of models with {case!r} in their labels.")
    return found


def bench(pairs: Sequence[Pair], until: float = float("inf")) -> Iterator[Timed]:
    """Time all pairs on this GPU, and yield each as it is known."""
    for pair, answer in answers(pairs, answered, until):
        if "failed" in answer:
            answer = {"limit_us": 0.0, "nbytes": 0.0, "flops": 0.0, "us": {}, "failed": {"": answer["failed"]}}
        yield Timed(pair, **answer)


def answered(pair: Pair) -> dict[str, Any]:
    """Time a pair in a child. An error of the device, after which nothing works, is raised."""
    us, failed = dict[str, float](), dict[str, str]()
    with torch.inference_mode():
        sweep = pair.sweep("cuda")
        jobs = [pair.job(way) for way in (None, *_peers(pair))]
        calls = sweep.arguments(jobs[0])
        limit, cost = sweep.limit(jobs[0], calls), pair.case.cost(2)
        for job in jobs:
            name = "" if job.cut is None else "library" if isinstance(job.cut, LibraryProduct) else short(job.cut)
            try:
                sweep.check(job, calls[0])
                us[name] = 1e6 * sweep.time(job, calls, limit.seconds)
            except Exception as error:
                torch.cuda.synchronize()
                failed[name] = f"{type(error).__name__}: {error}"[:300]
    torch.cuda.empty_cache()
    return {"limit_us": 1e6 * limit.seconds, "nbytes": cost.bytes, "flops": cost.flops, "us": us, "failed": failed}


def _peers(pair: Pair) -> list[Any]:
    op = OPS[pair.op]
    cuts = op.cuts()
    library = [cut for cut in (cuts.candidates(pair.case) if cuts else ()) if isinstance(cut, LibraryProduct)]
    torch_ops = [each.name for each in op.implementations if each.name == "torch"]
    return [*(library or torch_ops or ["reference"]), *PEERS.get(pair.op, {})]
