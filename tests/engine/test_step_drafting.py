"""How many drafts all rows of a step verify, against a device whose steps of every width cost a known time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.core.plan.step import RowKind, Rows, StepPlan, StepResult
from ridgeline.core.settings.speculation import MOST_VERIFIED, verified_widths
from ridgeline.engine.plan_builder import InFlight, Standing
from ridgeline.engine.row_drafting import HOPE
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable
from ridgeline.engine.step_drafting import PRIOR, WINDOW, Shares, StepDrafting
from tests.covering import by_pairs
from tests.engine.desk import make_request

Seconds = Callable[[int, int], float]  # of a step, by rows and drafts of a row

DEVICES: dict[str, Seconds] = {
    "bound by memory": lambda rows, width: 1 + 0.02 * (width > 0) + 0.002 * rows * (1 + width),
    "in between": lambda rows, width: 1 + 0.02 * rows * (1 + width),
    "bound by products": lambda rows, width: 0.2 + 0.04 * rows * (1 + width),
    "by memory, then by products": lambda rows, width: max(1, rows * (1 + width) / 24) + 0.05 * (width > 0),
    "verifying costs more besides": lambda rows, width: 1 + 0.3 * (width > 0) + 0.01 * rows * (1 + width),
    "drafts cost passes": lambda rows, width: 1 + 0.12 * width + 0.005 * rows * (1 + width),
}


class Device:
    """A device whose drafts are right with the probability `share`, and known to be behind two steps in flight.

    passes: drafts come of passes behind a step, which makes as many as it verifies; otherwise they are always there.
    stalls: the numbers of steps that seem to take very long. longer: how many times as long others seem to take.
    prompts: a chunk of a prompt runs beside one of so many steps, which are plain; 0: none does.
    expected: the tokens that the steps so far bring on average, whatever was drawn.
    """

    def __init__(
        self, most: int, rows: int, share: float, seconds: Seconds, *, depth: int | None = None, passes: bool = True
    ) -> None:
        self.drafting, self.share, self._seconds = StepDrafting(most, depth=depth), share, seconds
        self._most, self._depth, self._passes = most, depth, passes
        self.stalls, self.prompts, self._ran = set[int](), 0, 0
        self.longer: Callable[[], float] = lambda: 1 + 0.05 * self._draw.random()
        self._draw, self._made, self._flying = random.Random(rows), 0, deque[tuple[InFlight, StepResult]]()
        self.slots, self.seqs, self._rows = SlotTable(rows), list[Sequence](), dict[tuple[int, int], Rows]()
        for n in range(rows):
            self.seqs.append(seq := Sequence(make_request(str(n), [1], max_tokens=9), 1))
            self.slots.acquire(seq, 1)
            seq.drafts = self.drafting.wanted(seq)
        self.expected, self.emitted, self.seconds, self.taken = 0.0, 0, 0.0, Counter[int]()

    def rate(self, steps: int, rows: int | None = None) -> float:
        """Return the tokens a second that so many further steps bring on average. rows: of them; None: all."""
        expected, seconds = self.expected, self.seconds
        for number in range(steps):
            self._step(number, self.seqs[:rows])
        return (self.expected - expected) / (self.seconds - seconds)

    def _step(self, number: int, seqs: list[Sequence]) -> None:
        self._ran += 1
        beside = bool(self.prompts) and self._ran % self.prompts == 0
        width = 0 if beside else self.drafting.width(len(seqs), masked=False)
        rows = self._rows_of(seqs, width)
        if beside:
            rows = replace(rows, kinds_R=np.full(len(seqs), RowKind.CHUNK, np.int8))
        there = min(width, self._made) if self._passes else width
        right = there if self._depth is None else min(there, self._depth)
        emitted_R = np.array([1 + self._right(right) for _ in seqs], np.int32)
        elapsed = self._seconds(len(seqs), width)
        self.taken[width] += 1
        self.expected += len(seqs) * tokens(self.share, right)
        self.emitted, self.seconds, self._made = self.emitted + int(emitted_R.sum()), self.seconds + elapsed, width
        plan = StepPlan(id=number, rows=rows, kv_bound_R=np.ones(len(seqs), np.int32))
        noise = 1000 if self._ran in self.stalls else self.longer()
        self._flying.append(
            (InFlight(plan, seqs, []), StepResult(number, emitted_R=emitted_R, elapsed=elapsed * noise))
        )
        if len(self._flying) > 2:
            self.drafting.note(*self._flying.popleft(), 0.0)

    def _rows_of(self, seqs: list[Sequence], width: int) -> Rows:
        if (len(seqs), width) not in self._rows:
            emits = None if self._depth is None else 1 + self._depth
            rows = self._rows[len(seqs), width] = Standing.of(seqs, self.slots, drafts=width, emits=emits).rows
            assert (rows.num_tokens_R == 1 + width).all()
        return self._rows[len(seqs), width]

    def _right(self, drafts: int) -> int:
        right = 0
        while right < drafts and self._draw.random() < self.share:
            right += 1
        return right


def tokens(share: float, drafts: int) -> float:
    """Return the mean number of tokens that a row brings."""
    return sum(share**place for place in range(drafts + 1))


def best(most: int, rows: int, share: float, seconds: Seconds) -> float:
    """Return the highest rate of tokens that a fixed width has, or none."""
    widths = (0, *(width for width in verified_widths(most, whole=False) if rows * (1 + width) <= MOST_VERIFIED))
    return max(rows * tokens(share, width) / seconds(rows, width) for width in widths)


def test_widths_are_few_and_end_at_the_most() -> None:
    assert [verified_widths(most, whole=False) for most in (1, 2, 3, 4, 5, 8, 16)] == [
        (1,), (1, 2), (1, 3), (1, 2, 4), (1, 2, 5), (1, 2, 4, 8), (1, 4, 8, 16),
    ]  # fmt: skip
    assert verified_widths(11, whole=True) == (11,)


FORMS = [(5, 1, True), (5, 8, False), (3, 8, True), (5, 64, True)]  # most, rows, passes


@pytest.mark.few(10)
@pytest.mark.parametrize(("form", "name", "share"), by_pairs(FORMS, [*DEVICES], [0.0, 0.3, 0.6, 0.8, 0.95]), ids=str)
def test_the_rate_is_near_that_of_the_best_width(form: tuple[int, int, bool], name: str, share: float) -> None:
    most, rows, passes = form
    device = Device(most, rows, share, DEVICES[name], passes=passes)
    device.rate(500)
    assert device.rate(1500) > 0.96 * best(most, rows, share, DEVICES[name])


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_liar_costs_little_from_the_beginning(rows: int, name: str) -> None:
    device = Device(5, rows, 0.0, DEVICES[name])
    assert device.rate(1000) > 0.97 * best(5, rows, 0.0, DEVICES[name])
    assert device.taken[5] == 0, "what cannot pay is not tried"


def test_wider_steps_are_tried_where_one_draft_does_not_pay() -> None:
    """The first draft costs as much as five."""
    device = Device(5, 8, 0.8, lambda rows, width: 1.0 + (width > 0))
    assert device.rate(500) > 0.9 * 8 * tokens(0.8, 5) / 2
    assert device.taken[5] > 400


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0), (0.9, 0.4), (0.4, 0.9)])
def test_other_texts_get_another_width(before: float, after: float) -> None:
    seconds = DEVICES["in between"]
    device = Device(5, 8, before, seconds)
    device.rate(800)
    device.share = after
    device.rate(700)
    assert device.rate(500) > 0.95 * best(5, 8, after, seconds)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["in between", "bound by products", "verifying costs more besides"])
def test_one_row_whose_drafts_fail_all_at_once_goes_on_plainly_soon(name: str, rows: int) -> None:
    seconds = DEVICES[name]
    device = Device(5, rows, 0.9, seconds)
    device.rate(800)
    device.share = 0.0
    device.rate(100)
    assert device.rate(300) > 0.97 * best(5, rows, 0.0, seconds)


@pytest.mark.parametrize(("rows", "share"), [(1, 0.7), (64, 0.3)])
def test_a_machine_with_other_work_is_seen_through(rows: int, share: float) -> None:
    """Other work makes three steps in ten longer, up to three times."""
    seconds, draw = DEVICES["in between"], random.Random(5)
    device = Device(5, rows, share, seconds)
    device.longer = lambda: 1 + 2 * draw.random() if draw.random() < 0.3 else 1 + 0.1 * draw.random()
    device.rate(500)
    assert device.rate(1000) > 0.94 * best(5, rows, share, seconds)


@pytest.mark.parametrize("number", [4, 8, 12])
def test_a_machine_that_stalls_in_a_trial_finds_its_way_back(number: int) -> None:
    seconds = DEVICES["in between"]
    device = Device(5, 8, 0.0, seconds)
    device.stalls = {number}
    device.rate(80)
    device.share = 0.9
    device.rate(600)
    assert device.rate(300) > 0.9 * best(5, 8, 0.9, seconds)


@pytest.mark.parametrize("passes", [False, True])
def test_useless_drafts_are_switched_off_where_every_other_step_has_a_prompt(passes: bool) -> None:
    """No step that verifies has one before it that verified."""
    seconds = DEVICES["in between"]
    device = Device(5, 32, 0.9 if passes else 0.0, seconds, passes=passes)
    device.prompts = 2
    device.rate(200)
    assert device.rate(800) > 0.98 * 32 / seconds(32, 0)


def test_lookup_between_prompts_is_worth_what_it_finds() -> None:
    seconds = DEVICES["in between"]
    device = Device(5, 8, 0.9, seconds, passes=False)
    device.prompts = 2
    device.rate(200)
    assert device.rate(800) > 1.5 * 8 / seconds(8, 0)


def test_more_rows_than_a_wide_step_may_have_verify_fewer_drafts() -> None:
    seconds = DEVICES["bound by memory"]
    device = Device(5, 600, 0.9, seconds)
    for rows, width in ((85, 5), (86, 2), (170, 2), (171, 1), (256, 1), (257, 0), (600, 0)):
        device.taken.clear()
        device.rate(120, rows)
        assert max(device.taken) == width
        assert device.taken[width] > 60


def test_steps_of_other_numbers_of_rows_begin_with_the_best_width_so_far() -> None:
    device = Device(5, 16, 0.9, DEVICES["bound by memory"])
    device.rate(200, 16)
    assert device.drafting.width(3, masked=False) == 5
    assert device.drafting.width(3, masked=True) == 5


@pytest.mark.parametrize(("share", "whole_pays"), [(0.8, True), (0.2, False)])
def test_a_tree_is_verified_whole_or_not_at_all(share: float, whole_pays: bool) -> None:
    device = Device(11, 4, share, lambda rows, width: 1 + 0.01 * rows * (1 + width), depth=3)
    device.rate(1000)
    assert {*device.taken} == {0, 11}
    assert (device.taken[11] > 800) == whole_pays
    assert (device.taken[0] > 800) != whole_pays


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_time_that_drafts_save_is_known(share: float) -> None:
    seconds = DEVICES["in between"]
    device = Device(5, 8, share, seconds)
    device.rate(2000)
    saved = device.emitted / (8 / seconds(8, 0)) - device.seconds
    assert device.drafting.saved == pytest.approx(saved, abs=0.06 * device.seconds)


def test_steps_beside_prompts_teach_nothing() -> None:
    device = Device(3, 2, 0.9, DEVICES["bound by memory"])
    device.rate(100)
    width = device.drafting.width(2, masked=False)
    rows = Standing.of(device.seqs, device.slots, drafts=0).rows
    rows.kinds_R[1] = RowKind.CHUNK
    plan = StepPlan(id=1, rows=rows, kv_bound_R=np.ones(2, np.int32))
    for _ in range(200):
        result = StepResult(1, emitted_R=np.ones(2, np.int32), elapsed=100.0)
        assert not device.drafting.note(InFlight(plan, device.seqs, []), result, 0.0)
    assert device.drafting.width(2, masked=False) == width


def test_shares_are_those_of_the_rows_that_reach_a_place() -> None:
    """The oracle counts row by row. Rows that emit nothing were over before."""
    draw, shares = random.Random(3), Shares(4)
    reached, right = [0.0] * 4, [0.0] * 4
    for _ in range(40):
        emitted = [draw.choice((1, 2, 2, 3, 5)) for _ in range(8)]
        shares.note(np.array([*emitted, 0, 0], np.int32), 4)
        for place in range(4):
            reached[place] = reached[place] * (1 - 8 / WINDOW) + sum(count > place for count in emitted)
            right[place] = right[place] * (1 - 8 / WINDOW) + sum(count > place + 1 for count in emitted)
    among_all = (sum(right) + HOPE) / (sum(reached) + 1)
    share = [(a + PRIOR * among_all) / (b + PRIOR) for a, b in zip(right, reached, strict=True)]
    for width in range(5):
        assert shares.tokens(width) == pytest.approx(1 + sum(np.prod(share[: n + 1]) for n in range(width)))
