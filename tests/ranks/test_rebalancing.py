"""Experts that move between ranks while requests run: the tokens stay those of one device, and the ranks' load becomes
even and then stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.rebalancing import Rebalanced, Rebalancing
from ridgeline.perf.experts import imbalance
from ridgeline.perf.placement import equal_parts, rank_loads
from ridgeline.ranks import rebalancer
from ridgeline.ranks.leader import Group
from ridgeline.ranks.messages import FromLeader, Look, Move, decode_from_leader, encode
from ridgeline.ranks.rebalancer import Rebalancer
from tests.driving import Rig, ask, disturbed, rig
from tests.perf.test_moves import after
from tests.ranks.test_group import step_on

pytestmark = pytest.mark.usefixtures("forked_ranks")

SOON = 20.0  # seconds; notices take one or two, on a machine with other work more
EPLB = {"window_size": 4, "step_interval": 6, "num_redundant_experts": 4}
MOVING = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": EPLB}


class Ranks:
    """Ranks that route tokens by shares of the experts, and do what they are told."""

    def __init__(self, settings: Rebalancing, placement: Placement, ranks: int) -> None:
        self.own, self.placement = Rebalancer(settings, placement), list(placement)
        self.counts = [np.zeros((len(placement), 8), np.int64) for _ in range(ranks)]
        self.plan = 0
        self.moves: list[Move] = []

    def step(self, share_E: np.ndarray) -> None:
        """One step, after which a thread that looks for places has found them."""
        self.plan += 1
        said = self.own.before_step(dict.fromkeys(range(len(self.counts)), self.plan))
        for message in said:
            self._do(decode_from_leader(encode(message)))
        for rank, counts_LE in enumerate(self.counts):
            counts_LE += share_E
            if any(isinstance(message, Look) for message in said):
                experts = (8,) * len(counts_LE)
                load = ExpertLoad(tuple(range(len(counts_LE))), experts, counts_LE.copy(), counts_LE)
                self.own.note(rank, self.plan, load)
        if self.own._deciding is not None:
            self.own._deciding.exception(SOON)

    def _do(self, message: FromLeader) -> None:
        if isinstance(message, Move):
            self.moves.append(message)
            self.placement[message.mixture] = after(self.placement[message.mixture], message.takes)

    def imbalance(self, share_E: np.ndarray) -> list[float]:
        return [imbalance(rank_loads(share_E, held)) for held in self.placement]


SKEWED = np.array([100, 90, 5, 5, 4, 4, 3, 3])


@pytest.mark.parametrize("ranks", [1, 3])  # one that speaks for all, and ranks with requests of their own
def test_the_load_becomes_even_and_then_nothing_moves(ranks: int) -> None:
    own = Ranks(Rebalancing(window_size=5, step_interval=10), (equal_parts(8, 2),) * 3, ranks)
    assert min(own.imbalance(SKEWED)) > 1.7
    for _ in range(30):
        own.step(SKEWED)
    assert max(own.imbalance(SKEWED)) < 1.05
    figures, moves = own.own.figures, len(own.moves)
    assert moves > 0
    assert figures.moves == sum(len(move.takes) for move in own.moves)
    assert figures.before == figures.after == pytest.approx(own.imbalance(SKEWED)[0])
    for _ in range(50):
        own.step(SKEWED)
    assert len(own.moves) == moves
    assert own.own.figures.looks > figures.looks


def test_only_the_newest_tokens_count() -> None:
    own = Ranks(Rebalancing(window_size=4, step_interval=20), (equal_parts(8, 2),), 1)
    for step in range(1, 24):
        own.step(SKEWED if step > 16 else np.full(8, 10_000))
    assert max(own.imbalance(SKEWED)) < 1.05


def test_a_window_may_be_longer_than_the_time_between_looks() -> None:
    own = Ranks(Rebalancing(window_size=100, step_interval=7), (equal_parts(8, 2),), 1)
    for _ in range(16):
        own.step(SKEWED)
    assert max(own.imbalance(SKEWED)) < 1.05
    for _ in range(300):
        own.step(SKEWED)
    assert own.own.figures.looks == 45  # of every seventh step
    assert len(own.own._counts) < 32


def test_what_would_gain_little_stays() -> None:
    nearly = np.array([104, 100, 100, 100, 100, 100, 100, 96])
    own = Ranks(Rebalancing(window_size=5, step_interval=5), (equal_parts(8, 2),), 1)
    for _ in range(30):
        own.step(nearly)
    assert own.moves == []
    assert own.own.figures.before > 1


def test_few_slots_change_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancer, "MOST", 2)
    own = Ranks(Rebalancing(window_size=5, step_interval=5), (equal_parts(8, 4),), 1)
    done = []
    for _ in range(30):
        own.step(SKEWED)
        done.append(len(own.moves))
    assert max(np.diff(done)) == 1
    assert {len(move.takes) for move in own.moves} == {2}


def test_a_decision_that_fails_is_logged_and_the_next_one_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("of places")

    own = Ranks(Rebalancing(window_size=5, step_interval=10), (equal_parts(8, 2),), 1)
    with monkeypatch.context() as patched:
        patched.setattr(rebalancer, "decide", failing)
        for _ in range(15):
            own.step(SKEWED)
    assert own.moves == []
    assert own.own.figures.looks == 0
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    for _ in range(15):
        own.step(SKEWED)
    assert max(own.imbalance(SKEWED)) < 1.05


def test_counts_that_begin_anew_are_no_load() -> None:
    own = Ranks(Rebalancing(window_size=5, step_interval=10), (equal_parts(8, 2),), 1)
    for _ in range(9):
        own.step(SKEWED)
    own.own.forget()
    own.counts = [np.zeros((1, 8), np.int64)]
    for _ in range(30):
        own.step(SKEWED)
    assert max(own.imbalance(SKEWED)) < 1.05


def requests(count: int = 8) -> list[Request]:
    """Requests of few different tokens, which choose few experts."""
    return [ask(f"{n}", [7 + n % 2] * (3 + n), max_tokens=24 + n) for n in range(count)]


def group_of(own: Rig) -> Group:
    group = own.engine._worker
    assert isinstance(group, Group)
    return group


@pytest.fixture(scope="module")
def mixture(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def want(mixture: Path) -> dict[str, list[int]]:
    with rig(mixture) as one:
        return {name: outcome.tokens for name, outcome in one.run(*requests()).items()}


@pytest.fixture(
    scope="module",
    params=[("tensor_parallel_size", 2), ("data_parallel_size", 2), ("data_parallel_size", 4)],
    ids=["tp", "dp", "dp4"],
)
def moving(request: pytest.FixtureRequest, mixture: Path) -> Iterator[Rig]:
    name, size = request.param
    with rig(mixture, **{name: size}, **MOVING) as own:
        yield own


@pytest.mark.few(2)
def test_requests_get_the_tokens_of_one_device_while_experts_move(moving: Rig, want: dict[str, list[int]]) -> None:
    seen: list[Rebalanced] = []
    for _ in range(6):  # the same again, until nothing moves
        got = moving.run(*requests())
        assert moving.errors == []
        assert {name: got[name].tokens for name in want} == want
        figures = group_of(moving).figures().rebalanced
        assert figures is not None
        seen.append(figures)
    assert seen[-1].looks > 3
    assert seen[0].moves > 0
    assert seen[-1].copied > 0
    assert group_of(moving).figures().experts is not None


@pytest.mark.few(1)
def test_aborts_and_preemption_change_no_token(moving: Rig, want: dict[str, list[int]]) -> None:
    moved = group_of(moving).figures().rebalanced
    draw = Random(3)
    for number in range(2):
        moving.add(*requests())
        engines = getattr(moving.engine, "engines", None)
        if engines is None:
            left = disturbed(moving, draw, gives_way=0.2, leaves=0.02)
        else:
            moving.step()
            left = {"3", "5"}
            for name in left:
                moving.engine.abort(name)
            moving.run()
        assert moving.errors == []
        for name, tokens in want.items():
            got = moving.outcomes[name].tokens
            assert got == (tokens[: len(got)] if name in left else tokens), (number, name)
    assert moved is not None
    now = group_of(moving).figures().rebalanced
    assert now is not None
    assert now.looks > moved.looks


@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["tp", "dp"])
def test_a_rank_that_dies_in_the_middle_of_a_move_ends_the_group(size: dict[str, int], mixture: Path) -> None:
    """The other one waits in the collective, and no rank may wait for that."""
    with rig(mixture, **size, **MOVING) as own:
        group = group_of(own)
        processes = [member._process for member in group._members]
        tell = group._tell

        def noting(message: FromLeader) -> None:
            if isinstance(message, Move):  # the others are in it, or come to it
                processes[1].kill()
            tell(message)

        group._tell = noting  # type: ignore[method-assign]
        own.add(*requests())
        since = time.monotonic()
        with pytest.raises(DeviceLost, match="rank 1 was ended by SIGKILL"):
            step_on(own)
        assert time.monotonic() - since < 2 * SOON
        assert [process.poll() is not None for process in processes] == [True, True]
        assert not own.engine.has_work


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"enable_eplb": True}, "set enable_expert_parallel and tensor_parallel_size or data_parallel_size too"),
        ({"enable_eplb": 1}, "enable_eplb must be True or False"),
        ({"eplb_config": {}, "enable_eplb": False}, "it says how experts move; set enable_eplb too"),
        ({**MOVING, "tensor_parallel_size": 2, "deterministic": True}, "follows from the ranks of its experts"),
        ({**MOVING, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "lie on ranks of one axis alone"),
        ({**MOVING, "tensor_parallel_size": 2, "num_redundant_experts": 2}, "is 2, and 4 in eplb_config"),
        ({"eplb_config": [1]}, "eplb_config must be an object"),
        ({"eplb_config": {"window": 3}}, "eplb_config has no 'window'"),
        ({"eplb_config": {"window_size": 0}}, "window_size of eplb_config is 0; give a whole number from 1"),
        ({"eplb_config": {"step_interval": "3"}}, "step_interval of eplb_config is '3'"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "give a whole number from 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^[^\n]*\.$") as caught:
        LLMConfig(model="", device="cpu", **settings)
    assert complaint in str(caught.value)


def test_numbers_that_no_message_holds_are_kept_by_the_leader(mixture: Path) -> None:
    """No run is so long, so every step counts and nothing moves."""
    endless = {"window_size": 10**40, "step_interval": 10**40}
    with rig(mixture, tensor_parallel_size=2, **{**MOVING, "eplb_config": endless}) as own:
        own.run(*requests(2))
        assert group_of(own).figures().rebalanced == Rebalanced()


def test_what_vllm_has_beside_that_changes_nothing() -> None:
    given = {"window_size": 7, "use_async": True, "log_balancedness": True}
    config = LLMConfig(
        model="", tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, eplb_config=given
    )
    assert config.rebalancing == Rebalancing(window_size=7, step_interval=3000)
    assert LLMConfig(model="").rebalancing is None
