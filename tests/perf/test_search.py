"""The search for the fastest of many candidates."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import pytest

from ridgeline.perf.search import Found, Search, SearchSettings, SearchTrial, TrialOutcome, Unfit


class Machine:
    """Runs candidates in virtual time: `n` takes `times(n)` ms, 3 % more or less."""

    def __init__(self, times: Callable[[int], float], seed: int = 0) -> None:
        self.times, self.noise, self.now = times, Random(seed), 0.0
        self.prepared, self.runs = list[int](), Counter[int]()

    def prepare(self, n: int) -> Callable[[], float]:
        self.now += 0.1
        self.prepared.append(n)
        if n == 13:
            raise Unfit("13 is wrong in 2 of 8 numbers")

        def timed() -> float:
            took = 1e-3 * self.times(n) * self.noise.uniform(0.97, 1.03)
            self.now, self.runs[n] = self.now + took, self.runs[n] + 1
            return took

        return timed

    def search(self, cost: Callable[[int], float], **given: object) -> Search[int]:
        return Search(cost=cost, prepare=self.prepare, clock=lambda: self.now, **given)  # type: ignore[arg-type]


def winner(found: Found[int]) -> SearchTrial[int]:
    assert found.best
    return found.best


def of(found: Found[int], n: int) -> SearchTrial[int]:
    trial = found.of(n)
    assert trial
    return trial


def bowl(n: int) -> float:
    return 1 + abs(n - 21) / 10


def test_only_the_best_by_the_model_are_prepared_and_the_fastest_wins() -> None:
    machine = Machine(bowl)
    found = machine.search(lambda n: abs(n - 23)).run(range(100))
    assert sorted(machine.prepared) == list(range(19, 27)) or sorted(machine.prepared) == list(range(20, 28))
    assert winner(found).candidate == 21
    assert winner(found).rank in (3, 4)
    assert Counter(trial.outcome for trial in found.trials)[TrialOutcome.UNTRIED] == 92
    assert len(found.trials) == 100
    assert found.took == pytest.approx(machine.now)


def test_a_candidate_far_behind_is_dropped_after_few_timings() -> None:
    machine = Machine(lambda n: 1.0 if n == 3 else 2.0 if n == 5 else 1.05)
    found = machine.search(float).run(range(8))
    assert (of(found, 5).outcome, machine.runs[5]) == (TrialOutcome.BEHIND, 2)
    assert "times the fastest after 2 timings" in of(found, 5).reason
    assert {machine.runs[n] for n in range(8) if n != 5} == {8}
    assert winner(found).candidate == 3


def test_timing_ends_when_one_is_left() -> None:
    machine = Machine(lambda n: 1.0 + n)
    found = machine.search(float).run(range(8))
    assert set(machine.runs.values()) == {2}
    assert winner(found).candidate == 0


def test_a_wrong_candidate_is_named_and_cannot_win() -> None:
    machine = Machine(lambda n: 0.1 if n == 13 else 1.0)
    found = machine.search(lambda n: -n).run([11, 12, 13])
    assert (of(found, 13).outcome, of(found, 13).reason) == (TrialOutcome.UNFIT, "13 is wrong in 2 of 8 numbers")
    assert winner(found).candidate in (11, 12)


def test_what_cannot_run_by_the_model_is_never_prepared() -> None:
    machine = Machine(bowl)
    found = machine.search(lambda n: math.inf if n == 21 else math.nan if n == 22 else n).run([20, 21, 22])
    assert machine.prepared == [20]
    assert [trial.outcome for trial in found.trials] == [TrialOutcome.WON, TrialOutcome.UNFIT, TrialOutcome.UNFIT]
    assert not Machine(bowl).search(lambda n: math.inf).run([1]).trials[0].times


def test_what_runs_today_is_measured_and_keeps_its_place_in_a_tie() -> None:
    machine = Machine(lambda n: 1.0, seed=3)
    found = machine.search(float, settings=SearchSettings(tie=0.1)).run(range(20), always=[19])
    assert machine.prepared == [19, 0, 1, 2, 3, 4, 5, 6]
    assert winner(found).candidate == 19
    faster = Machine(lambda n: 1.0 - 0.2 * (n == 4)).search(float, settings=SearchSettings(tie=0.1))
    assert winner(faster.run(range(20), always=[19])).candidate == 4


def test_leading_names_what_run_measures() -> None:
    machine = Machine(bowl)
    search = machine.search(lambda n: -n)
    expected = search.leading(range(30), always=[2])
    search.run(range(30), always=[2])
    assert machine.prepared == expected
    assert (expected[0], len(expected)) == (2, 8)


def test_others_are_drawn_by_the_seed_beside_the_best() -> None:
    settings = SearchSettings(measured=3, drawn=2, seed=1)
    search = Machine(bowl).search(lambda n: math.inf if n == 4 else n, settings=settings)
    assert search.leading(range(40))[:3] == [0, 1, 2]
    drawn = search.leading(range(40))[3:]
    assert len({4, *range(3), *drawn}) == 6
    assert drawn == search.leading(range(40))[3:]
    assert search.leading([0, 4, 1, 5]) == [0, 1, 5]


def test_time_that_is_over_leaves_the_rest_late() -> None:
    machine = Machine(lambda n: 1.0)
    found = machine.search(float, settings=SearchSettings(seconds=0.35)).run(range(8))
    outcomes = Counter(trial.outcome for trial in found.trials)
    assert outcomes == {TrialOutcome.WON: 1, TrialOutcome.LATE: 7}
    assert machine.prepared == [0, 1, 2, 3]


def test_generations_find_what_the_space_does_not_hold() -> None:
    def near(n: int, random: Random) -> Iterable[int]:
        yield from (n - 1, n + 1, n + random.choice((-4, 4)))

    settings = SearchSettings(measured=3, generations=12, seed=1)
    machine = Machine(bowl)
    found = machine.search(bowl, neighbours=near, settings=settings).run([0, 1, 2])
    assert winner(found).candidate == 21
    assert winner(found).generation > 0
    assert len(machine.prepared) == len(set(machine.prepared))


def test_the_same_seed_gives_the_same_record() -> None:
    def record(seed: int) -> str:
        search = Machine(bowl, seed=5).search(lambda n: abs(n - 23), settings=SearchSettings(seed=seed))
        return json.dumps(search.run(range(50)).record())

    assert record(1) == record(1) != record(2)


def test_candidates_that_are_measured_are_given_together_first() -> None:
    given = list[list[int]]()
    machine = Machine(bowl)
    machine.search(float, together=lambda some: given.append(list(some))).run(range(10))
    assert given == [list(range(8))]


@pytest.mark.parametrize("wrong", [{"measured": 0}, {"behind": 0.9}, {"tie": 1.0}, {"seconds": -1.0}, {"repeats": 0}])
def test_settings_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}.* {next(iter(wrong.values()))}[,;]"):
        SearchSettings(**wrong)  # type: ignore[arg-type]
