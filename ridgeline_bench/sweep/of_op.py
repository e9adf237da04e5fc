"""The sweep of one op, made from the op: its cases × its implementations, the cuts of its kernels, and its peers.

    ridgeline bench sweep ssd --json results.jsonl [--case WORD]

The op's small cases are checked only, with every implementation and cut; those of real models are timed too. "by
itself" is what the platform gets. Results are compared with the op's reference, within the case's tolerance: an error
of 1 is the largest that is right. An op with states is checked by the states that it writes as well. Peers are other
projects' kernels for the same arguments (peers.py); each is left out where it cannot be imported. A limit is the larger
of bytes / 4.42 TB/s and, if the op is bound by the matrix units, FLOPs / 750 TFLOP/s of the op's least work (twice
that for products of 8-bit numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cuts, OpCase
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import OPS
from ridgeline.perf.search import Search, SearchSettings, Timer
from ridgeline_bench.kernels import allowed
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.peers import PEERS
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep, moved, tensors

MEMORY = 20e9  # bytes of arguments that take turns, at most


class OpSweep(Sweep):
    start, silence = 90.0, 120.0  # other projects' kernels try their cuts when they are first launched
    _compared = False

    def __init__(self, options: SweepOptions, device: str) -> None:
        super().__init__(options, device)
        self.of, self.workload = OPS[options.name], f"sweep:{options.name}"
        cases, on_gpu = self.of.cases(), Platform(device_type="cuda", arch="sm_90")
        real = (*cases.real, *cases.swept)
        self.small_cases, self.real_cases = ({case.label: case for case in some} for some in (cases.small, real))
        if self.dry:
            self.real_cases = self.small_cases
        self.platform = on_gpu if self.dry or not torch.cuda.is_available() else Platform.of(torch.device("cuda"))
        self.functions = {i.name: i.load for i in self.of.implementations if i.supports(self.platform)}
        self.cuts, self.peers = self.of.cuts(), PEERS.get(options.name, {})

    def jobs(self) -> list[Job]:
        return [
            Job(label, self.of.name, tokens_of(case), case.form, way, chosen=i == 0, timed=timed)
            for timed, cases in ((False, self.small_cases), (True, self.real_cases))
            for label, case in (cases.items() if timed or not self.options.beside else ())
            for i, way in enumerate(self.ways(case, timed))
        ]

    def ways(self, case: OpCase, timed: bool) -> list[Any]:
        """Return the ways to launch the op: the default (None), other implementations, cuts, peers."""
        if self.options.beside:
            return [*([None] if self.functions else []), *self.peers]
        others = list(self.functions)[1:] or ([] if self.functions else ["reference"])
        if timed and self.of.matrix:  # plain torch is much slower, and waits for the host, which no graph can hold
            others = [name for name in others if name != "torch"]
        cuts = ranked(self.cuts, case, self.options.best) if self.cuts else ()
        return [*([None] if self.functions else []), *others, *cuts, *(self.peers if timed and not self.dry else ())]

    def case_of(self, job: Job) -> OpCase:
        return (self.real_cases if job.timed else self.small_cases)[job.case]

    def arguments(self, job: Job) -> list[Any]:
        """Return arguments and keyword arguments of launches that take turns."""
        case = self.case_of(job)
        for peer in self.peers.values():
            peer.forget()
        if self.device.type == "meta":
            return [self._without_memory(case)]
        first = self._given(case, self.device)
        nbytes = sum(x.nbytes for x in tensors(tuple(first[0])))
        number = min(self.turns(case.cost(2).bytes), max(1, int(MEMORY / max(1, nbytes)))) if job.timed else 1
        return [first, *(self._given(case, self.device) for _ in range(number - 1))]

    def _without_memory(self, case: OpCase) -> tuple[Any, dict[str, Any]]:
        """Return the arguments on the meta device: made there, or copied from a smaller case."""
        if case.bare:
            return self._given(case, self.device)
        cpu, small = torch.device("cpu"), case.reduced()
        given = moved((small.lasting(self.dtype, cpu), small.options(self.dtype, cpu)), self.device)
        return self._prepared(case, given[0]), given[1]

    def _given(self, case: OpCase, device: torch.device) -> tuple[Any, dict[str, Any]]:
        return self._prepared(case, case.lasting(self.dtype, device)), case.options(self.dtype, device)

    def _prepared(self, case: OpCase, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.cuts.prepared(case, given) if self.cuts and self.platform.device_type == "cuda" else given

    def launch(self, job: Job, arguments: Any) -> Any:
        """Return the outputs, and if results are compared what is written to the arguments. Nothing that another launch
        has written is there then."""
        (given, options), case = arguments, self.case_of(job)
        if self._compared:
            for x, as_it_was in zip(tensors(tuple(given)), self.untouched(job, arguments), strict=True):
                x.copy_(as_it_was)
        out = self._function(job)(*given, **options)
        return (out, case.written(given)) if self._compared else out

    def _function(self, job: Job) -> Callable[..., Any]:
        if job.cut is None:
            return next(iter(self.functions.values()))()
        if self.cuts and not isinstance(job.cut, str):
            return self.cuts.with_cut(job.cut)
        if job.cut in self.peers:
            return self.peers[job.cut]
        return self.functions[job.cut]() if job.cut in self.functions else self.of.reference

    def reference(self, job: Job, arguments: Any) -> Any:
        (given, options), case = arguments, self.case_of(job)
        if not case.checked:
            return None
        return copied(self.of.reference(*given, **options)), copied(case.written(given))

    def defined(self, job: Job, arguments: Any, result: Any) -> Any:
        """Return copies, since the next launch writes to the same arguments; of a peer the outputs alone."""
        return copied(result[:1] if job.cut in self.peers else result)

    def untouched(self, job: Job, arguments: Any) -> list[Tensor]:
        """Return copies of the tensors of the arguments, from before the first launch."""
        made: list[Tensor] = self.kept(
            "untouched", job.setting, lambda: [x.clone() for x in tensors(tuple(arguments[0]))]
        )
        return made

    def check(self, job: Job, arguments: Any) -> float | None:
        self.untouched(job, arguments)
        self._compared = True
        try:
            return super().check(job, arguments)
        finally:
            self._compared = False

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        """Return the largest error in units of what is allowed; integers are equal."""
        case, worst = self.case_of(job), 0.0
        for ours, theirs in zip(got, want, strict=True):
            if not theirs.numel():
                continue
            if not theirs.is_floating_point():
                worst = worst if torch.equal(ours.to(theirs.dtype), theirs) else torch.inf
                continue
            excess = (ours.float() - theirs.float()).abs() / allowed(theirs, case)
            worst = max(worst, float(excess.nan_to_num(torch.inf).max()))
        return worst

    def interpreted(self, job: Job) -> Any:
        """Return None for cuts and for cases that are slow to interpret."""
        if job.ours and not (self.cuts and isinstance(job.cut, self.cuts.interpreted)):
            return None
        return (job.cut if isinstance(job.cut, str) else type(job.cut)) if job.tokens <= 8 else None

    def compiles(self, job: Job) -> bool:
        return job.cut not in (*self.peers, "torch", "reference")

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        case = self.case_of(job)
        cost, peak = case.cost(2), self.peak * (2 if case.in_bytes else 1)
        seconds = max(cost.bytes / self.bandwidth, cost.flops / peak if self.of.matrix else 0.0)
        return Limit(seconds, cost.flops, f"{cost.bytes / 1e6:.0f} MB")


def ranked(cuts: Cuts, case: OpCase, best: int) -> Sequence[Any]:
    """Return a case's cuts; with `best` only so many, the first ones by the model or else by their order."""
    found = list(dict.fromkeys(cuts.candidates(case)))
    if not best:
        return found
    order = {cut: float(place) for place, cut in enumerate(found)}
    cost = order.__getitem__ if cuts.cost is None else partial(cuts.cost, case)
    return Search(cost=cost, prepare=unprepared, settings=SearchSettings(measured=best)).leading(found)


def unprepared(candidate: Any) -> Timer:
    """Raise an error: this search only ranks."""
    raise AssertionError(candidate)


def tokens_of(case: OpCase) -> int:
    """Return the tokens of a case: its own number, or those of its rows."""
    own: Any = getattr(case, "tokens", None) or getattr(case, "rows", None)
    if own is None:
        return len(getattr(case, "lengths", ()))  # of rows of one token
    return own if isinstance(own, int) else sum(row[0] if isinstance(row, tuple) else row for row in own)


def copied(result: Any) -> Any:
    """Return copies of all tensors of a result, however nested."""
    return tuple(x.clone() for x in tensors(result if isinstance(result, tuple) else (result,)))
