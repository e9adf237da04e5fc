"""The stages of a pipeline give the tokens of one device, whatever requests ask for and whatever becomes of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline import LLM
from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import StepPlan
from ridgeline.ranks import leader
from ridgeline.ranks.parts import Dealer, Part
from tests import tiny_models
from tests.driving import Outcome, Rig, ask, rig
from tests.ranks.stages import Stages, staged
from tests.ranks.test_group import SOON, OneOf, group_of, processes_of, requests, step_on, wrong_plan

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = [(7 * i) % 300 + 3 for i in range(90)]  # three steps


def mixed() -> list[Request]:
    """Requests that need every part of a plan, prompts of several steps among them."""
    return [
        *requests(),
        ask("guided", [5, 6, 7], guidance_scale=1.5, negative_prompt=[9, 8], temperature=0.8, seed=4),
        ask("long", LONG, max_tokens=5, prompt_logprobs=1),
        ask("long too", [*LONG[:70], 1, 2], max_tokens=5, logprobs=1),
        ask("long and masked", [*LONG[:41]], max_tokens=5, mask=OneOf(3, 5, 250)),
    ]


def assert_same(got: dict[str, Outcome], want: dict[str, Outcome]) -> None:
    assert got.keys() == want.keys()
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert (got[name].finish_reason, got[name].error) == (outcome.finish_reason, None)
        for one, other in ((got[name].scored, outcome.scored),):
            assert [token for token, _ in one] == [token for token, _ in other]
            np.testing.assert_allclose([score for _, score in one], [score for _, score in other], atol=1e-4)
        assert len(got[name].prompt) == len(outcome.prompt)
        np.testing.assert_allclose(
            [entry.logprob for entry in got[name].prompt], [entry.logprob for entry in outcome.prompt], atol=1e-4
        )


MODELS = [
    ("llama", 2, {}),
    ("qwen3", 3, {"num_hidden_layers": 3}),  # tied embeddings
    ("gpt2", 4, {"num_hidden_layers": 4}),  # and a table of positions
    ("gemma2", 2, {"num_hidden_layers": 3}),  # two cache groups, of which a stage has more layers
    ("gemma4", 3, {}),  # and of which a stage has none
    ("qwen3_moe", 2, {}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "stages", "changes"), MODELS, ids=[family for family, _, _ in MODELS])
def test_requests_get_the_tokens_of_one_device(
    family: str, stages: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_models.build(family, **changes).save_pretrained(tmp_path)
    with rig(tmp_path, kv_cache_memory=1 << 19) as one:
        want, load = one.run(*mixed()), one.worker.figures().experts
    with staged(tmp_path, stages) as own:
        got = own.run(*mixed())
        assert own.errors == []
        worker: Stages = own.worker  # type: ignore[assignment]
        own_load = worker.figures().experts
    assert_same(got, want)
    assert any(not part.ends_R.all() for parts in worker.dealt for part in parts), "no chunk was cut"
    assert max(map(len, worker.dealt)) == stages
    assert (load is None) == (own_load is None)
    if load is not None and own_load is not None:
        assert own_load.layers == load.layers
        assert own_load.total_LE.sum() == load.total_LE.sum()  # their order may differ


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("crowded")
def test_requests_that_come_and_go_where_memory_is_short(seed: int, tmp_path: Path) -> None:
    """Preemptions and aborts: slots and blocks pass from one request to the next while parts are under way."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    choose = random.Random(seed)
    prompts = [[*LONG[: choose.randrange(1, 40)], choose.randrange(300)] for _ in range(14)]
    aborted = set(choose.sample(range(14), 4))
    asked = [ask(f"r{i}", prompt, max_tokens=choose.randrange(2, 25)) for i, prompt in enumerate(prompts)]
    with rig(tmp_path, kv_cache_memory=1 << 19) as one:
        want = one.run(*asked)
    with staged(tmp_path, 2, kv_cache_memory=18 * 1024, max_model_len=66, scheduling_policy="priority") as own:
        for number, request in enumerate(asked):
            own.add(request)
            for _ in range(choose.randrange(4)):
                own.step()
            if number in aborted:
                own.engine.abort(f"r{choose.randrange(number + 1)}")
        got = own.run()
        assert own.engine.scheduler.preemptions.total() > 0
        assert own.errors == []
        pool = own.engine.scheduler.cache.pool
        assert pool.free_pages == pool.num_pages
    assert sum(outcome.finish_reason is None for outcome in got.values()) <= 4  # those that were aborted
    for name, outcome in got.items():
        assert outcome.tokens == want[name].tokens[: len(outcome.tokens)], name
        assert outcome.finish_reason in (None, want[name].finish_reason)


def test_a_part_that_all_stages_refuse_fails_its_plan_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests start over."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    asked = [ask(f"r{i}", [i + 1, 2, 3], max_tokens=12) for i in range(4)]
    with rig(tmp_path, kv_cache_memory=1 << 19) as one:
        want = one.run(*asked)
    with staged(tmp_path, 2) as own:
        worker: Stages = own.worker  # type: ignore[assignment]
        deal = worker._dealer.parts

        def one_is_wrong(plan: StepPlan) -> list[Part]:
            parts = deal(plan)
            if plan.id == 5:
                rows = parts[1].plan.rows
                wrong = replace(parts[1].plan, rows=replace(rows, generations_R=rows.generations_R + 1))
                parts[1] = replace(parts[1], plan=wrong)
            return parts

        monkeypatch.setattr(worker._dealer, "parts", one_is_wrong)
        assert_same(own.run(*asked), want)
        assert len(own.errors) == 1
        assert "generation" in own.errors[0]


def test_outcomes_of_many_parts_wait_until_they_are_collected(tmp_path: Path) -> None:
    """As if no stage had had the time to look."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    asked = ask("long", LONG[:30], prompt_logprobs=0)
    with rig(tmp_path, kv_cache_memory=1 << 19) as one:
        want = one.run(asked)
    with staged(tmp_path, 2, least_piece=1) as own:
        worker: Stages = own.worker  # type: ignore[assignment]
        worker._dealer.most = 15
        own.add(asked)
        own.engine.fill()
        last = worker.workers[-1]._thread
        assert last is not None
        last.submit(lambda: None).result()
        assert len(worker.dealt[0]) == 15
        assert_same(own.run(), want)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Rig]]:
    """A mixture on two stages of two ranks each, with prompts cut into small pieces."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.build("qwen3_moe").save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "Dealer", partial(Dealer, least_piece=2))
        with rig(folder, kv_cache_memory=1 << 19, tensor_parallel_size=2, pipeline_parallel_size=2) as own:
            yield folder, own


@pytest.mark.dealt
def test_processes_on_stages_and_tensor_parallel_within(two: tuple[Path, Rig]) -> None:
    folder, own = two
    with rig(folder, kv_cache_memory=1 << 19) as one:
        want, load = one.run(*mixed()), one.worker.figures().experts
    got = own.run(*mixed())
    assert own.errors == []
    assert_same(got, want)
    group = group_of(own)
    own_load = group.figures().experts
    assert load is not None
    assert own_load is not None
    assert own_load.layers == load.layers
    assert own_load.total_LE.sum() == load.total_LE.sum()


def test_no_stage_waits_for_one_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts draw tokens that no later part needs: the last stage must be rid of them, or it stops taking parts."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(leader, "Dealer", partial(Dealer, least_piece=2, long_piece=4))
    settings = {"kv_cache_memory": 1 << 20, "max_num_seqs": 48, "max_num_batched_tokens": 96}
    asked = [ask(f"r{i}", [i + 3, *LONG[i : i + 11]], max_tokens=1) for i in range(48)]
    with rig(tmp_path, **settings) as one:
        want = one.run(*asked)
    with rig(tmp_path, **settings, pipeline_parallel_size=2, distributed_timeout_seconds=20) as own:
        got = own.run(*asked)
        assert own.errors == []
    assert_same(got, want)


def test_all_stages_look_at_experts_while_somebody_watches(two: tuple[Path, Rig]) -> None:
    _, own = two
    group, seen = group_of(own), []
    with group.watching_experts(seen.append):
        own.run(ask("watched", LONG[20:40], max_tokens=3))
    assert seen
    assert all(load.layers == (0, 1) for load in seen)
    steps = [load.step_LE.sum(1).tolist() for load in seen]
    assert all(first == second for first, second in steps), "both stages ran the same tokens"
    assert seen[0].step_tokens == 20


def test_a_plan_that_all_ranks_refuse_fails_alone(two: tuple[Path, Rig]) -> None:
    _, own = two
    own.run(ask("before", [1, 2, 3], max_tokens=3))
    group = group_of(own)
    group.submit(wrong_plan(group, 10_000))
    result = group.collect()
    assert "generation" in (result.error or "")
    assert not result.device_lost
    assert all(process.poll() is None for process in processes_of(group))


def test_the_death_of_a_stage_is_noticed_at_once(two: tuple[Path, Rig]) -> None:
    """The last test of this group, since it ends it."""
    _, own = two
    group = group_of(own)
    own.add(ask("endless", [1, 2, 3], max_tokens=200), ask("other", [4, 5], max_tokens=200))
    for _ in range(3):
        own.step()
    processes_of(group)[1].kill()  # of the first stage; the second one waits for it
    since = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1 was ended by SIGKILL"):
        step_on(own)
    assert time.monotonic() - since < SOON
    assert all(process.poll() is not None for process in processes_of(group))


def test_what_cannot_be_divided_is_one_sentence(tiny_model: Callable[[str], Path]) -> None:
    def refused(**settings: Any) -> str:
        with pytest.raises(InvalidConfig) as caught, LLM(tiny_model("llama"), device="cpu", **settings):
            pass
        return str(caught.value)

    assert "is 3, and the model has 2 layers" in refused(pipeline_parallel_size=3)
    assert "at least 1" in refused(pipeline_parallel_size=0)
    assert "whole number" in refused(pipeline_parallel_size="2")
    assert "2 stages of at least one layer, 2 layers in all" in refused(
        pipeline_parallel_size=2, pipeline_layer_partition="2,0"
    )
    assert "give numbers of layers" in refused(pipeline_parallel_size=2, pipeline_layer_partition="all")
