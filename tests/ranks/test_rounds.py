"""Ranks that divide experts and replay graphs: all of them the same one in each round, whatever each has to run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ridgeline.assembly.choices import Choices, choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.wiring import Wiring, _engine
from ridgeline.core.plan.embeds import Embeds
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Feature, StepPlan, StepResult
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.side_by_side import Engines
from ridgeline.parallel.exchange import SwapExchange
from ridgeline.parallel.mesh import Mesh
from ridgeline.ranks.apart import Apart, Seat, size_of
from ridgeline.ranks.messages import FromLeader, PlanSender, Round
from ridgeline.ranks.rank import Leader, Rank
from ridgeline.worker import graphs
from ridgeline.worker.graphs import Graphs
from ridgeline.worker.inputs import Shape
from ridgeline.worker.launch import RoundLaunch
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.memory import MemoryReport
from tests.driving import Rig, ask, rig
from tests.parallel.threads import ThreadAxis, on_ranks
from tests.ranks import test_group
from tests.test_speculation import Replayed

RANKS = 2
HYBRIDS = ("qwen3_next", "qwen3_5_moe", "jamba", "lfm2_moe", "granite_hybrid_moe")


class InThreads(Apart):
    """The group whose ranks are threads of this process. rounds: their sizes, and the ranks that had a plan."""

    def __init__(self, workers: list[LocalWorker]) -> None:
        self.workers = workers
        self._ranks = [Rank(worker, cast("Leader", None), speaks=True) for worker in workers]
        self._senders = [PlanSender() for _ in workers]
        self._waiting: deque[list[StepPlan | None]] = deque()
        self._sent = [deque() for _ in workers]
        self.seats = [Seat(self, rank) for rank in range(len(workers))]
        self._moved, self._lost, self._rebalancer = 0.0, None, None
        self.rounds: list[tuple[Shape, bool, set[int]]] = []

    def tell(self, rank: int, message: FromLeader) -> None:
        if isinstance(message, Round):
            if rank == 0:
                self.rounds.append((Shape(message.rows, message.tokens, message.each), message.captured, set()))
            if message.plan is not None:
                self.rounds[-1][2].add(rank)
        self._ranks[rank]._take(message)

    def collect_of(self, rank: int) -> StepResult:
        self._send_all()
        self._sent[rank].popleft()
        return self.workers[rank].collect()

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@contextmanager
def apart(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[tuple[Rig, InThreads]]:
    """Engines whose ranks replay buckets as on a GPU, op by op."""
    options = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 4, "kv_cache_memory": 1 << 19, **settings}
    config = LLMConfig(model=folder, dtype="float32", device="cpu", debug_checks=True, **options)

    def rank(axis: ThreadAxis) -> tuple[Choices, LocalWorker, MemoryReport]:
        choices = choose(config, torch.device("cpu"), Mesh(exchange=SwapExchange(axis), whole_experts=True))
        return choices, *device_worker(choices, None)

    made = on_ranks(RANKS, rank)
    choices, _, memory = made[0]
    monkeypatch.setattr(graphs, "Graph", Replayed)
    for _, worker, _ in made:
        runner = worker._runner
        runner.launch.graphs = Graphs(runner.segments, 4, 32)
    group = InThreads([worker for _, worker, _ in made])
    wiring = Wiring(memory, choices.model.spec.vocab_size, choices.max_seqs, choices.cascade, None, False)
    engines = Engines([_engine(config, seat, wiring) for seat in group.seats], group)
    try:
        yield Rig(engines), group
    finally:
        group.shutdown()


def requests() -> list[Request]:
    """Requests of every kind, prompts that run in chunks, and more than the ranks have slots for."""
    return [
        *test_group.requests(),
        ask("long", [n % 50 for n in range(75)], max_tokens=4),  # its chunks fill steps
        *(ask(f"more {n}", [n + 1, 2 * n + 1], max_tokens=2 + n) for n in range(7)),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "nemotron_h_moe",
        "deepseek_v3",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in HYBRIDS),
    ],
)
def test_ranks_replay_the_same_graphs_and_answer_as_one_device(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a hybrid have the states of their own requests, and narrower rows for its experts; those of a model
    of latent attention the latents."""
    folder = tiny_model(family)
    with rig(folder) as one:
        want = one.run(*requests())
    with apart(folder, monkeypatch) as (own, group):
        own.engine.rehearse()  # as on a GPU, before any request
        got = own.run(*requests())
        assert not own.errors
        assert isinstance(own.engine, Engines)
        assert own.engine._load.total() == 0
        alone = own.run(ask("alone", [4, 4, 4], max_tokens=9))["alone"]
        counts = [replays(worker) for worker in group.workers]
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        np.testing.assert_allclose([p for _, p in got[name].scored], [p for _, p in outcome.scored], atol=1e-4)
    assert len(alone.tokens) == 9
    assert counts[0] == counts[1], "all ranks replay the same graphs, as often"
    assert sum(counts[0].values()) >= len([captured for _, captured, _ in group.rounds if captured]) > 30
    assert {1, 0} <= {shape.each for shape in counts[0]}
    lent = [shape for shape, _, ranks in group.rounds if len(ranks) < RANKS]
    assert any(shape.each == 1 for shape in lent), "a rank without a plan takes part in a step of decoding"


def replays(worker: LocalWorker) -> dict[Shape, int]:
    """Return the number of replays of each graph of a rank."""
    found = worker._runner.launch.graphs
    assert found is not None
    return {shape: graph.replays for (shape, _, _), graph in found._graphs.items() if graph.replays}  # type: ignore[attr-defined]


def test_prompts_given_as_vectors_run_op_by_op_on_all_ranks(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("qwen3_moe")
    with rig(folder) as one:
        asked = given(one.runner.decoder.spec.hidden_size)
        want = one.run(*asked)
    with apart(folder, monkeypatch) as (own, group):
        got = own.run(*asked)
        assert not own.errors
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
    assert {captured for _, captured, _ in group.rounds} == {True, False}


def given(width: int) -> list[Request]:
    """Return requests with and without vectors as their prompts."""
    return [
        replace(ask("vectors", [0] * 5, max_tokens=6), embeds=vectors(5, width)),
        *(ask(f"tokens {n}", [n + 3, n], max_tokens=6) for n in range(4)),
    ]


def vectors(tokens: int, width: int) -> Embeds:
    x_TM = np.random.default_rng(1).standard_normal((tokens, width), dtype=np.float32)
    return Embeds("float32", width, x_TM.tobytes())


def test_a_rounds_size_holds_the_plans_of_all_ranks(tiny_model: Callable[[str], Path]) -> None:
    plans: list[StepPlan] = []
    with rig(tiny_model("qwen3_moe")) as one:
        submit = one.worker.submit
        one.worker.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign, func-returns-value]
        one.run(ask("a", [1, 2, 3, 4, 5], max_tokens=3), ask("b", [1], max_tokens=3))
    prompts, decoding = plans[0], plans[-1]
    assert decoding.rows.tokens_each == 1
    assert size_of([decoding]) == (len(decoding.rows), len(decoding.rows), 1, True)
    assert size_of([decoding, prompts])[1:] == (prompts.num_tokens, 0, True)


def test_a_round_replays_the_graph_with_adapters_where_rows_of_this_rank_have_some() -> None:
    """All ranks replay graphs of one size, and each the one that its own rows need."""
    launch, asked = RoundLaunch.__new__(RoundLaunch), list[tuple[Shape, bool]]()

    def holding(shape: Shape, *, adapted: bool = False) -> str:
        asked.append((shape, adapted))
        return "adapted" if adapted else "plain"

    graphs: Any = SimpleNamespace(holding=holding)
    launch._round, launch._shape = graphs.holding(Shape(4, 4, 1)), Shape(4, 4, 1)
    plans: Any = [SimpleNamespace(rows=SimpleNamespace(features=each)) for each in (Feature.NONE, Feature.ADAPTER)]
    assert [launch._graph_of(plan, graphs) for plan in plans] == ["plain", "adapted"]
    assert {shape for shape, _ in asked} == {Shape(4, 4, 1)}
    launch._round = None
    assert [launch._graph_of(plan, graphs) for plan in plans] == [None, None]
