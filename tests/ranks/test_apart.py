"""Ranks with requests and caches of their own that divide the experts: they answer as one device does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli.serve import prepare
from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.plan.request import Request
from ridgeline.engine.side_by_side import Engines
from ridgeline.ranks import members
from ridgeline.ranks.apart import Apart
from tests.driving import Rig, ask, rig
from tests.ranks import test_group

pytestmark = pytest.mark.usefixtures("forked_ranks")

SOON = 15


def requests() -> list[Request]:
    """Requests that need every part of a plan, more than one rank has slots for."""
    return [
        *test_group.requests(),
        ask("guided", [40, 41, 42], guidance_scale=1.5, negative_prompt=(7, 8)),
        *(ask(f"more {n}", [n + 1, 2 * n + 1], max_tokens=2 + n) for n in range(7)),
    ]


@pytest.fixture(scope="module")
def mixture(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3_moe")


def settings(size: int) -> dict[str, object]:
    return {"data_parallel_size": size, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def two(mixture: Path) -> Iterator[Rig]:
    with rig(mixture, **settings(2)) as own:
        yield own


def test_ranks_with_requests_of_their_own_answer_as_one_device(mixture: Path, two: Rig) -> None:
    with rig(mixture) as one:
        want = one.run(*requests())
        load = one.worker.figures().experts
    engines = two.engine
    assert isinstance(engines, Engines)
    got = two.run(*requests())
    group = engines._worker
    assert isinstance(group, Apart)
    own_load = group.figures().experts
    assert all(engine.headroom.elapsed > 0 for engine in engines.engines), "both ranks ran requests"
    two.run(ask("alone", [4, 4, 4], max_tokens=5))  # the other rank has nothing to do
    figures = engines.scheduler.figures()
    assert (figures.running, figures.waiting, figures.pages_used) == (0, 0, 0)
    assert figures.hit_tokens > 0, "a prompt goes where its beginning is cached"
    assert figures.num_pages == 2 * engines.engines[0].scheduler.figures().num_pages
    two.add(ask("left", [3, 3], max_tokens=90), ask("ended", [3, 3], max_tokens=1))
    two.step()
    assert engines.abort("left")
    assert not engines.abort("left")
    two.run()
    assert engines._load.total() == 0
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert got[name].finish_reason == outcome.finish_reason
        np.testing.assert_allclose([p for _, p in got[name].scored], [p for _, p in outcome.scored], atol=1e-4)
        assert len(got[name].prompt) == len(outcome.prompt)
    assert len(two.outcomes["alone"].tokens) == 5
    assert load is not None
    assert own_load is not None
    assert own_load.total_LE.sum() >= load.total_LE.sum()  # a prompt that another rank has cached runs again


def test_plans_of_a_rank_go_out_before_their_results_are_wanted(two: Rig) -> None:
    """While another rank has nothing to do too: or its device would wait for the host after every other step."""
    two.add(ask("steady", [1, 2], max_tokens=20))
    group = two.engine._worker
    assert isinstance(group, Apart)
    for _ in range(6):
        two.step()
        assert sum(map(len, group._sent)) == 1  # the other of two plans in flight
        assert not group._waiting
    two.run()


def test_the_tokens_of_a_step_are_those_of_all_ranks_that_had_a_part(two: Rig) -> None:
    ran = 0
    two.add(ask("longer", [11, 12, 13, 14, 15], max_tokens=9), ask("shorter", [21, 22, 23], max_tokens=2))
    while two.engine.has_work:
        two.step()
        ran += two.engine.last_tokens
    assert ran == 5 + 8 + 3 + 1  # the last token of each is never run


@pytest.mark.dealt
def test_a_plan_that_one_rank_refuses_loses_the_group(two: Rig) -> None:
    """The others wait for its experts: no rank may wait until a collective gives up. It is the last test of this group,
    since it ends it."""
    two.add(ask("endless", [1, 2], max_tokens=200), ask("other", [7] * 9, max_tokens=200))
    for _ in range(3):
        two.step()
    group = two.engine._worker
    assert isinstance(group, Apart)
    plan = two.engine.last_plan
    assert plan is not None
    rank = next(n for n, each in enumerate(group._senders) if each._rows.get(0) is plan.rows)
    group.put(rank, replace(plan, id=10_000, rows=replace(plan.rows, generations_R=plan.rows.generations_R + 1)))
    since = time.monotonic()
    while not (result := group.collect_of(rank)).device_lost:
        assert result.error is None
    assert f"rank {rank} failed, and others wait for its experts" in (result.error or "")
    assert time.monotonic() - since < SOON
    assert group.collect_of(1 - rank).device_lost


def step_on(own: Rig) -> None:
    for _ in range(300):
        own.step()


def test_a_rank_that_stands_still_loses_the_group(mixture: Path) -> None:
    with rig(mixture, **settings(2), hang_timeout=2.0) as two:
        two.add(ask("endless", [1, 2], max_tokens=200))
        for _ in range(3):
            two.step()
        group = two.engine._worker
        assert isinstance(group, Apart)
        idle = 1 - next(n for n, each in enumerate(two.engine.engines) if each.has_work)  # type: ignore[attr-defined]
        group._members[idle]._process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        with pytest.raises(DeviceLost, match=f"rank {idle} has given no sign of life"):
            step_on(two)
        assert time.monotonic() - since < SOON
        assert not two.engine.has_work
        with pytest.raises(DeviceLost):
            two.add(ask("late", [1]))


def test_what_cannot_be_is_one_sentence(mixture: Path, tiny_model: Callable[[str], Path]) -> None:
    def refused(folder: Path, **options: object) -> str:
        with pytest.raises(InvalidConfig) as caught, LLM(folder, device="cpu", **options):  # type: ignore[arg-type]
            pass
        return str(caught.value)

    assert "serve --data-parallel-size" in refused(mixture, data_parallel_size=2)
    both = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert "do not go together" in refused(mixture, tensor_parallel_size=2, **both)
    assert "for GPUs" in refused(mixture, all2all_backend="peer", **both)
    assert "set data_parallel_size" in refused(mixture, all2all_backend="peer")
    assert "the model has none" in refused(tiny_model("llama"), **both)
    assert "does not divide" in refused(mixture, data_parallel_size=3, enable_expert_parallel=True)


@pytest.mark.thorough
def test_the_mixture_that_is_shipped_writes_the_same_text() -> None:
    prompts = ["Once upon a time", "The little dog", "Tom and"]
    params = SamplingParams(temperature=0, max_tokens=12)
    folder = Path(members.__file__).parents[1] / "assets" / "embedded-moe"

    def texts(**options: object) -> list[str]:
        with LLM(folder, device="cpu", dtype="float32", **options) as llm:  # type: ignore[arg-type]
            return [result.outputs[0].text for result in llm.generate(prompts, params, use_tqdm=False)]

    assert texts(data_parallel_size=4, enable_expert_parallel=True) == texts()


def test_a_server_starts_one_engine_of_such_ranks() -> None:
    settings = {"model": "", "data_parallel_size": 2, "device": "cpu", "port": 0}
    both = prepare({**settings, "enable_expert_parallel": True}, source="test")._config
    assert (both.data_parallel_size, both.engine["data_parallel_size"]) == (1, 2)
    replicas = prepare(settings, source="test")._config
    assert (replicas.data_parallel_size, "data_parallel_size" in replicas.engine) == (2, False)
    groups = prepare({**settings, "enable_expert_parallel": True, "tensor_parallel_size": 2}, source="test")._config
    assert (groups.data_parallel_size, "data_parallel_size" in groups.engine) == (2, False)
