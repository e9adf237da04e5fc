"""All ways to divide a model over a number of devices, side by side. Devices that a division leaves free run it again,
as replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.division import Division, Times
from ridgeline.perf.footprint import check_shape, expert_parameters
from ridgeline.perf.planner import Deployment, Plan, Point

WORTH_NAMING = 0.1  # share of a step


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One division of some devices. plan, alone, best: None if the model does not divide or fit so, for the reason
    `refused`; `best` also if no batch meets the objectives.

    replicas: how often the devices run the model.
    alone: the figures of a single request.
    """

    division: Division
    replicas: int
    plan: Plan | None = None
    alone: Point | None = None
    refused: str = ""

    @property
    def best(self) -> Point | None:
        return self.plan.best if self.plan is not None else None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all devices, at the best batch."""
        return self.replicas * self.best.tokens_per_second if self.best is not None else 0.0

    @property
    def name(self) -> str:
        return f"{self.replicas} x {self.division}" if self.replicas > 1 else str(self.division)

    @property
    def why(self) -> str:
        """The parts of a decode step's time at the best batch, beside computing, in words."""
        if self.plan is None or self.best is None:
            return self.refused or "no batch meets the SLOs"
        parts = _shares(self.best.decode)
        if (idle := self.plan.divided.idle(self.best.batch, self.plan.deployment.input)) >= WORTH_NAMING:
            parts.append(f"stages idle {idle:.0%}")
        if self.plan.part.layers[0].mixer.states == self.plan.deployment.model.layers[0].mixer.states:
            parts += ["each device caches all heads"] if self.division.tp > 1 else []
        return ", ".join(parts) or "computing"


def _shares(times: Times) -> list[str]:
    words = {"tp": "sums", "ep": "dispatch and combine", "cp": "merges", "pp": "sends", "bubble": "bubble"}
    shares = {word: getattr(times, name) / times.total for name, word in words.items()}
    return [f"{word} {share:.0%}" for word, share in shares.items() if share >= WORTH_NAMING]


def divisions(gpus: int, *, experts: bool) -> Iterator[tuple[Division, int]]:
    """Yield every division of at most so many devices whose number divides theirs, and how often it fits there."""
    check_shape(gpus=gpus)
    factors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp in factors:
        for groups in factors if experts else (1,):
            for whole in {1, tp} if experts and groups == 1 else {tp * groups}:
                for pp in factors:
                    for cp in factors if groups == pp == 1 else (1,):  # stages divide no tokens
                        if gpus % (tp * groups * pp * cp) == 0:
                            division = Division(tp=tp, pp=pp, ep=whole if experts else 1, cp=cp)
                            yield division, gpus // division.devices


def compare(deployment: Deployment, gpus: int) -> list[Candidate]:
    """Return all divisions of so many devices: those with the most tokens per second within the objectives first, and
    among equals the quicker for one request. Those that are refused come last."""
    found = []
    for division, replicas in divisions(gpus, experts=bool(expert_parameters(deployment.model))):
        try:
            plan = Plan(replace(deployment, **vars(division)))
            found.append(Candidate(division=division, replicas=replicas, plan=plan, alone=plan.point(1)))
        except InvalidConfig as error:
            found.append(Candidate(division=division, replicas=replicas, refused=str(error)))
    return sorted(found, key=lambda each: (-each.tokens_per_second, each.alone.step if each.alone else float("inf")))


def quickest(candidates: list[Candidate]) -> Candidate | None:
    """Return the division with the shortest time of one request that runs alone."""
    plans = [each for each in candidates if each.plan is not None]
    return min(plans, key=_alone, default=None)


def _alone(candidate: Candidate) -> float:
    assert candidate.plan is not None
    assert candidate.alone is not None
    return candidate.alone.ttft + (candidate.plan.deployment.output - 1) * candidate.alone.step
