"""Techniques that make decoding faster, alone and one upon another: fewer weights, fewer bits, drafts.

A weight takes `kept` × `bits` + `index` bits. Which weights are kept costs bits too, and those do not shrink with the
values:

| form | kept weights | index, bits of each weight of the dense matrix |
|---|---|---|
| dense | all, some of them zero | 0: nothing is saved, as ordinary kernels have it |
| bitmap | unstructured | 1 |
| 2:4 | two of four (kept = 0.5) | 1: two bits for each one that is kept |

So half the weights of 16 bits take 9 bits, and half of those of 2 bits take 2: the index eats what was saved. A step
that verifies drafts reads the weights once for the tokens that it brings; the head that makes the drafts is not
compressed with the model, so the fewer bits the model has, the more of the step the head takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.division import Divided
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import Precision

INDEX = {"dense": 0.0, "bitmap": 1.0, "2:4": 1.0}
HEAD_ITEM = 2.0  # bytes of a weight of a drafting head


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique; what it leaves alone has its default.

    bits: of a kept weight. kept: the share of weights that are kept, in a form of `INDEX`.
    drafts: tokens that a step verifies besides one. tokens: those that a row brings on average.
    head, passes: weights of the head that drafts, and how often it runs in a step.
    points: what it costs in quality, in points of any measure that adds up, such as perplexity.
    """

    name: str
    bits: float = 0.0
    kept: float = 1.0
    form: str = "bitmap"
    drafts: int = 0
    tokens: float = 1.0
    head: float = 0.0
    passes: int = 0
    points: float = 0.0

    def __post_init__(self) -> None:
        if self.form not in INDEX:
            raise InvalidConfig(f"{self.name}: form is {self.form!r}; use {', '.join(INDEX)}.")
        if not 0 < self.kept <= 1:
            raise InvalidConfig(f"{self.name}: kept is {self.kept:g}; it must be above 0 and at most 1.")
        if self.form == "2:4" and self.kept not in (0.5, 1.0):
            raise InvalidConfig(f"{self.name}: kept is {self.kept:g}; of the form 2:4 it is 0.5.")
        if not 1 <= self.tokens <= self.drafts + 1:
            raise InvalidConfig(
                f"{self.name}: tokens is {self.tokens:g}; {self.drafts} drafts bring from 1 to {self.drafts + 1}."
            )
        for name in ("bits", "head", "passes", "points"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidConfig(f"{self.name}: {name} is {getattr(self, name):g}; it must be at least 0.")


class Stacked(NamedTuple):
    """The effect of one technique at one batch.

    bits: of a weight, after it and those before it. alone, stacked: tokens per second with it only, and upon those
    before it. gain, more: these, relative to none, and to those before it. per_point: tokens per second that it brings
    alone for a point of quality; None: it costs none.
    """

    name: str
    batch: int
    bits: float
    alone: float
    stacked: float
    gain: float
    more: float
    per_point: float | None


def parsed(text: str) -> Technique:
    """Return the technique of "NAME:key=value,key=value". Raise InvalidConfig."""
    name, _, rest = text.partition(":")
    given: dict[str, object] = {}
    for each in filter(None, rest.split(",")):
        key, _, value = each.partition("=")
        kind = {"form": str, "drafts": int, "passes": int}.get(key, float)
        if key == "name" or key not in Technique.__dataclass_fields__:
            keys = ", ".join(field for field in Technique.__dataclass_fields__ if field != "name")
            raise InvalidConfig(f"{text!r} has the key {key!r}; use {keys}.")
        try:
            given[key] = kind(value)
        except ValueError as error:
            raise InvalidConfig(f"{text!r}: {key} is {value!r}, which is no number.") from error
    if not name or not given:
        raise InvalidConfig(f"{text!r} is no technique; write NAME:key=value, such as wanda:kept=0.5,points=0.9.")
    return Technique(name=name, **given)  # type: ignore[arg-type]


def weight_bits(techniques: Sequence[Technique], plain: float) -> float:
    """Return the bits of a weight of the dense matrix. The last technique that says something counts."""
    bits = next((each.bits for each in reversed(techniques) if each.bits), plain)
    sparse = next((each for each in reversed(techniques) if each.kept < 1), None)
    if sparse is None or sparse.form == "dense":
        return bits
    return sparse.kept * bits + INDEX[sparse.form]


def tokens_per_second(plan: Plan, techniques: Sequence[Technique], batch: int) -> float:
    """Return the output tokens of decode steps per second, with these techniques together."""
    d = plan.deployment
    divided = Divided(d.model, d.division, d.hardware, plan.links, _precision(plan, techniques), plan.kv_dtype)
    drafting = next((each for each in reversed(techniques) if each.drafts), Technique(name="none"))
    tokens, cached = 1 + drafting.drafts, d.decoding_context + drafting.drafts
    step = divided.step(StepShape([tokens] * batch, [cached] * batch, tokens * batch)).total
    head = drafting.passes * drafting.head * HEAD_ITEM / d.tp / d.hardware.bandwidth
    return d.division.groups * batch * drafting.tokens / (step + head)


def stacked(deployment: Deployment, techniques: Sequence[Technique], batches: Sequence[int]) -> list[Stacked]:
    """Return each technique alone and upon those before it, by batch, in their order."""
    plan, found = Plan(deployment), []
    for batch in batches:
        plain = before = tokens_per_second(plan, [], batch)
        for number, each in enumerate(techniques):
            so_far = techniques[: number + 1]
            alone, both = (tokens_per_second(plan, which, batch) for which in ([each], so_far))
            per_point = (alone - plain) / each.points if each.points else None
            bits = weight_bits(so_far, 8 * plan.precision.weight)
            found.append(Stacked(each.name, batch, bits, alone, both, alone / plain, both / before, per_point))
            before = both
    return found


def _precision(plan: Plan, techniques: Sequence[Technique]) -> Precision:
    p = plan.precision
    bits = weight_bits(techniques, 8 * p.weight)
    if bits == 8 * p.weight:
        return p
    return Precision(name="stacked", weight=bits / 8, item=p.item, product_rate=p.other_rate, other_rate=p.other_rate)
