"""How many drafts pay, against a device whose steps cost a known time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ridgeline.core.plan.step import StepPlan, StepResult
from ridgeline.engine.plan_builder import InFlight, Standing
from ridgeline.engine.row_drafting import RowDrafting
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable
from tests.engine.desk import make_request

MOST = 5


class Device:
    """Steps of `base` seconds, `each` more for every token, and `extra` more where drafts are verified. A draft is
    right with a probability of its request's. found: the share of steps in which there are any. catching: the seconds
    that a network takes, before drafts are verified again, for each step that ran without it."""

    found, catching = 1.0, 0.0

    def __init__(self, shares: list[float], base: float, each: float, extra: float = 0.0, seed: int = 0) -> None:
        self._draw, self._times = random.Random(seed), (base, each, extra)
        self.slots, self.drafting = SlotTable(len(shares)), RowDrafting(MOST)
        self.shares: dict[Sequence, float] = {}
        for n, share in enumerate(shares):
            seq = Sequence(make_request(str(n), [1], max_tokens=9), 1)
            self.slots.acquire(seq, 1)
            seq.drafts = self.drafting.wanted(seq)
            self.shares[seq] = share
        self.emitted, self.seconds, self._waiting = 0, 0.0, 0

    def steps(self, count: int) -> float:
        """Return the tokens a second of so many further steps."""
        emitted, seconds = self.emitted, self.seconds
        for number in range(count):
            self._step(number)
        return (self.emitted - emitted) / (self.seconds - seconds)

    def _step(self, number: int) -> None:
        seqs = list(self.shares)
        rows = Standing.of(seqs, self.slots, drafts=self.drafting.width(len(seqs), masked=False)).rows
        verifies = bool((rows.num_tokens_R > 1).any())
        drafted_R = (rows.num_tokens_R - 1) * (self.found == 1 or self._draw.random() < self.found)
        emitted_R = np.array([1 + self._right(seq, int(k)) for seq, k in zip(seqs, drafted_R, strict=True)], np.int32)
        base, each, extra = self._times
        elapsed = base + each * float((1 + drafted_R).sum()) + extra * verifies
        self._waiting += 1
        if verifies:
            elapsed, self._waiting = elapsed + self.catching * (self._waiting - 1), 0
        self.emitted, self.seconds = self.emitted + int(emitted_R.sum()), self.seconds + elapsed
        plan = StepPlan(id=number, rows=rows, kv_bound_R=np.ones(len(seqs), np.int32))
        noise = 1 + 0.05 * self._draw.random()
        result = StepResult(number, emitted_R=emitted_R, drafted_R=drafted_R, elapsed=elapsed * noise)
        self.drafting.note(InFlight(plan, seqs, []), result, 0.0)

    def _right(self, seq: Sequence, drafts: int) -> int:
        right = 0
        while right < drafts and self._draw.random() < self.shares[seq]:
            right += 1
        return right


def best(shares: list[float], base: float, each: float, extra: float = 0.0) -> float:
    """The highest rate of tokens that any choice of one number of drafts for all requests, or of none, has."""

    def rate(drafts: int) -> float:
        tokens = sum(sum(share**i for i in range(drafts + 1)) for share in shares)
        return tokens / (base + each * len(shares) * (1 + drafts) + extra * bool(drafts))

    return max(rate(drafts) for drafts in range(MOST + 1))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("shares", "base", "each", "extra"),
    [
        ([0.8], 1.0, 0.01, 0.0),  # bound by memory: drafts are all but free
        ([0.8] * 8, 1.0, 0.01, 0.0),
        ([0.6] * 8, 1.0, 0.05, 0.0),
        ([0.8] * 64, 0.2, 0.02, 0.0),  # bound by products: no draft pays
        ([0.3] * 16, 1.0, 0.05, 0.0),
        ([0.9] * 4 + [0.1] * 12, 1.0, 0.03, 0.0),
        ([0.0] * 8, 1.0, 0.05, 0.0),  # a liar
        ([0.0], 1.0, 0.2, 0.0),
        ([0.5] * 16, 1.0, 0.01, 2.0),  # a step that verifies costs three times as much
    ],
)
def test_the_rate_is_near_the_best_one(shares: list[float], base: float, each: float, extra: float) -> None:
    device, most = Device(shares, base, each, extra), best(shares, base, each, extra)
    device.steps(300)
    assert device.steps(2000) > 0.96 * most


def test_a_liar_costs_little_from_the_beginning() -> None:
    device = Device([0.0] * 8, 1.0, 0.05)
    assert device.steps(1000) > 0.97 * best([0.0] * 8, 1.0, 0.05)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("found", "share", "each"), [(0.3, 0.3, 0.35), (0.4, 0.2, 0.3), (0.45, 0.9, 0.1)])
def test_steps_with_many_drafts_count_as_long_as_they_take(found: float, share: float, each: float, seed: int) -> None:
    """Where most steps find no drafts, the median of their times says nothing of the others."""

    class Scarce(Device):
        def __init__(self) -> None:
            super().__init__([share], 1.0, each, 0.15, seed)
            self.found = found
            self.drafting.wanted = lambda seq: MOST  # type: ignore[method-assign]

    device = Scarce()
    device.steps(300)
    plain = 1 / (1.0 + each)
    drafts = found * (share * (1 - share**MOST) / (1 - share)) + 1
    verifying = drafts / (1.15 + each * (1 + found * MOST))
    assert device.steps(3000) > 0.97 * max(plain, verifying)


@pytest.mark.parametrize("catching", [0.05, 0.2])
def test_trials_that_must_catch_up_first_come_more_seldom(catching: float) -> None:
    device = Device([0.2] * 2, 1.0, 0.3)
    device.catching = catching
    device.steps(600)
    assert device.steps(6000) > 0.975 * best([0.2] * 2, 1.0, 0.3)


def test_a_request_that_becomes_predictable_gets_drafts_again() -> None:
    device = Device([0.0] * 4, 1.0, 0.02)
    device.steps(500)
    device.shares = dict.fromkeys(device.shares, 0.9)
    device.steps(1500)
    assert device.steps(500) > 0.9 * best([0.9] * 4, 1.0, 0.02)


@pytest.mark.parametrize(("share", "each"), [(0.8, 0.01), (0.3, 0.02), (0.0, 0.05)])
def test_the_time_that_drafts_save_is_known(share: float, each: float) -> None:
    device = Device([share] * 8, 1.0, each)
    device.steps(2000)
    plain = 8 / (1.0 + each * 8)  # tokens a second without drafts
    saved = device.emitted / plain - device.seconds
    assert device.drafting.saved == pytest.approx(saved, abs=0.06 * device.seconds)


def test_a_share_may_fade_to_nothing() -> None:
    drafting, seq = RowDrafting(MOST), Sequence(make_request("0", [1], max_tokens=9), 1)
    for _ in range(40000):  # a wrong draft each, until no float is as small as the weight of what was right before
        drafting._try(seq, 1, 1)
    assert drafting.share(seq) == 0
    assert drafting.wanted(seq) == 0


class Forest(Device):
    """A device whose requests verify trees of `MOST` drafts and a depth of 2. A depth is right with a probability of
    its request's, if the one before is."""

    def __init__(self, shares: list[float], base: float, each: float, extra: float = 0.0, seed: int = 0) -> None:
        super().__init__(shares, base, each, extra, seed)
        self.drafting = RowDrafting(MOST, depth=2)
        for seq in self.shares:
            seq.drafts = self.drafting.wanted(seq)
            assert seq.drafts == MOST  # before anything is known

    def _right(self, seq: Sequence, drafts: int) -> int:
        assert drafts in (0, MOST)
        return super()._right(seq, min(drafts, 2))


@pytest.mark.parametrize(
    ("share", "base", "each"),
    [(0.8, 1.0, 0.01), (0.5, 1.0, 0.02), (0.0, 1.0, 0.05), (0.6, 0.2, 0.05), (0.9, 1.0, 0.05)],
)
def test_trees_are_verified_where_they_pay(share: float, base: float, each: float) -> None:
    """All or nothing: the rate is near that of the better way, whichever it is."""
    rows, device = 8, Forest([share] * 8, base, each)
    plain = rows / (base + each * rows)
    tree = rows * (1 + share + share**2) / (base + each * rows * (1 + MOST))
    device.steps(600)
    assert device.steps(2000) > 0.95 * max(plain, tree)
