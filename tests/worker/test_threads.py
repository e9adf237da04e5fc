"""The number of threads, chosen against machines whose steps take a known time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.core.cores import Load
from ridgeline.worker.threads import Threads, Work
from tests.driving import ask, rig


class Machine:
    """Cores of which other programs take some. A step divides its work among its threads, and the slowest one ends it:
    a thread that shares its core with another program has half of it, and turns of the scheduler besides."""

    def __init__(self, cores: int, others: int, *, tells: bool = True, seed: int = 0) -> None:
        self.cores, self.others, self._draw = cores, others, random.Random(seed)
        self.threads = Threads(cores, lambda: max(1, cores - self.others) if tells else None)
        self.seconds, self.changes = 0.0, 0

    def time_of(self, threads: int, work: Work) -> float:
        """Return the mean seconds of a step with so many threads."""
        shared = threads > self.cores - self.others
        return (0.002 + 0.016 * work.size / threads) * (2.5 if shared else 1.0)

    def steps(self, count: int, work: Callable[[int], Work] = lambda _: Work((1, 7))) -> float:
        """Run so many steps. Return how many times as long they took as with the best fixed number of threads."""
        seconds, best = 0.0, [0.0] * self.cores
        for number in range(count):
            now, done = self.threads.count, work(number)
            taken = self.time_of(now, done) * self._draw.uniform(0.95, 1.15)
            seconds += taken
            for threads in range(self.cores):
                best[threads] += self.time_of(threads + 1, done) * 1.05
            self.threads.note(done, taken)
            self.changes += self.threads.count != now
        return seconds / min(best)


def mixed(number: int) -> Work:
    """Decode steps, and a chunk of a prompt in every fifth one."""
    return Work((-9, 8), 200 + number % 7 * 40) if number % 5 == 0 else Work((1 + number % 3, 7))


@pytest.mark.parametrize("work", [lambda _: Work((1, 7)), mixed])
@pytest.mark.parametrize("cores", [2, 16])
def test_on_a_quiet_machine_the_number_stays(cores: int, work: Callable[[int], Work]) -> None:
    machine = Machine(cores, 0)
    assert machine.steps(3000, work) < 1.01
    assert machine.changes == 0


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("work", [lambda _: Work((1, 7)), mixed])
@pytest.mark.parametrize(("cores", "others"), [(2, 1), (2, 4), (16, 1), (16, 12)])
def test_on_a_busy_machine_it_comes_near_the_best_one(
    cores: int, others: int, work: Callable[[int], Work], tells: bool
) -> None:
    """Also where the system does not tell how busy it is, if it becomes busy while steps run."""
    machine = Machine(cores, others if tells else 0, tells=tells)
    machine.steps(50, work)
    machine.others = others
    machine.steps(400, work)
    assert machine.steps(3000, work) < (1.12 if tells else 1.4)


@pytest.mark.parametrize("cores", [2, 16])
def test_it_returns_once_the_others_are_gone(cores: int) -> None:
    machine = Machine(cores, 0)
    machine.steps(100)
    machine.others = cores // 2
    machine.steps(300)
    assert machine.threads.count < cores
    machine.others = 0
    machine.steps(1000)
    assert machine.threads.count == cores
    assert machine.steps(1000) < 1.02


def test_a_number_that_is_as_good_as_another_does_not_go_back_and_forth() -> None:
    class Indifferent(Machine):
        def time_of(self, threads: int, work: Work) -> float:
            return 0.01 * self._draw.choice((1.0, 1.0, 1.0, 4.0))  # whatever the number is, and always disturbed

    machine = Indifferent(4, 0)
    machine.steps(4000)
    assert machine.changes < 60


def test_a_trial_that_takes_far_longer_ends_early() -> None:
    """Threads that spin on shared cores may take fifty times as long, and a trial must not."""

    class Spinning(Machine):
        def time_of(self, threads: int, work: Work) -> float:
            return 0.01 * (50 if threads > 1 else 1)

    machine = Spinning(2, 1)
    assert machine.steps(4000) < 1.4


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("ridgeline.worker.threads.available", lambda: 2)
    assert Threads.where_they_may_change(Load()) is not None
    monkeypatch.setenv(name, "2")
    assert Threads.where_they_may_change(Load()) is None


def test_steps_run_with_the_number_that_was_chosen(tiny_model: Callable[[str], Path]) -> None:
    """In the worker's thread alone: the caller's own number is as before."""
    with rig(tiny_model("llama")) as own:
        before, seen = torch.get_num_threads(), []
        own.worker._threads = threads = Threads(3, lambda: 3)
        forward = own.runner.forward

        def recording(*arguments: object) -> object:
            seen.append(torch.get_num_threads())
            threads.count = 2
            return forward(*arguments)  # type: ignore[arg-type]

        own.runner.forward = recording  # type: ignore[method-assign, assignment]
        [outcome] = own.run(ask("a", (5, 6, 7, 8), max_tokens=4)).values()
        assert len(outcome.tokens) == 4
        assert seen[:3] == [3, 2, 2]
        assert torch.get_num_threads() == before
        assert threads._newest  # steps were noted
