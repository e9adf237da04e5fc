"""Stages of a pipeline pass states that every token replaces from piece to piece of a prompt, and keep them as one
device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec")

from ridgeline.core.plan.request import Request
from ridgeline.ranks import leader
from ridgeline.ranks.parts import Dealer
from tests import tiny_models
from tests.driving import Outcome, Rig, ask, disturbed, rig
from tests.parallel.test_covering_design import asked
from tests.ranks.stages import Stages, staged
from tests.ranks.test_pipeline import LONG, assert_same

pytestmark = pytest.mark.usefixtures("forked_ranks")

ROOM = {"kv_cache_memory": 1 << 22}
QUICK = ("jamba", "qwen3_next", "falcon_h1", "zamba2")  # the last hands on the tokens as embedded, and shares weights
DEEPER: dict[str, dict[str, Any]] = {
    "mamba2": {"num_hidden_layers": 4},
    "rwkv": {},
    "zamba2": {},
    "jamba": {},
}


def thorough(family: str) -> object:
    return family if family in QUICK else pytest.param(family, marks=pytest.mark.thorough)


def cut(own: Rig) -> int:
    """How many parts had pieces of prompts that did not end there."""
    worker: Stages = own.worker  # type: ignore[assignment]
    return sum(not part.ends_R.all() for parts in worker.dealt for part in parts)


def assert_empty(own: Rig) -> None:
    pool = own.engine.scheduler.cache.pool
    assert pool.free_pages == pool.num_pages


@pytest.mark.few(2)
@pytest.mark.parametrize("family", [thorough(family) for family in tiny_models.RECURRENT])
def test_requests_get_the_tokens_of_one_device(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    with rig(folder, **ROOM) as one:
        want = one.run(*asked())
    with staged(folder, 2, **ROOM) as own:
        got = own.run(*asked())
        assert own.errors == []
        assert cut(own) > 0
        assert_empty(own)
    assert_same(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma2"])
def test_later_stages_compute_in_the_model_s_dtype(family: str, dtype: str, tiny_model: Callable[[str], Path]) -> None:
    """Their first parameter may be a norm's weight, which is float32 where it has an offset."""
    folder = tiny_model(family)
    with rig(folder, dtype=dtype, **ROOM) as one:
        want = one.run(*asked())
    with staged(folder, 2, dtype=dtype, **ROOM) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert {name: outcome.tokens for name, outcome in got.items()} == {n: outcome.tokens for n, outcome in want.items()}


def test_a_stage_without_shared_blocks_hands_on_whole_embeddings(tmp_path: Path) -> None:
    """Its ranks must not leave the table's sum to other ranks."""
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    tiny_models.save("zamba2", tmp_path, layers_block_type=kinds, num_mem_blocks=1)
    with rig(tmp_path, **ROOM) as one:
        want = one.run(*asked())
    with staged(tmp_path, 2, tensor_parallel_size=2, pipeline_layer_partition="1,3", **ROOM) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, want)


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.thorough) for family in DEEPER])
def test_more_stages_give_the_same(family: str, stages: int, tmp_path: Path) -> None:
    changes = DEEPER[family]
    if stages > (changes or tiny_models.CONFIGS[family][1])["num_hidden_layers"]:
        pytest.skip("the model has fewer layers")
    tiny_models.build(family, **changes).save_pretrained(tmp_path)
    with rig(tmp_path, **ROOM) as one:
        want = one.run(*asked())
    with staged(tmp_path, stages, **ROOM) as own:
        got = own.run(*asked())
        assert own.errors == []
        assert cut(own) > 0
    assert_same(got, want)


@pytest.mark.few(1)
@pytest.mark.parametrize("least_piece", [1, 3])
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("mamba", marks=pytest.mark.thorough)])
def test_a_conversation_goes_on_from_states_kept_inside_of_prompts(
    family: str, least_piece: int, tiny_model: Callable[[str], Path]
) -> None:
    """Marks lie in pieces, at their ends, and near them: a request that begins there finds the state of one device."""

    def turns(own: Rig) -> dict[str, Outcome]:
        """Prompts that begin alike for so long, one after the other, and then what a conversation goes on with."""
        for same in (*range(9, 60, 5), 90):
            own.run(ask(f"to {same}", [*LONG[:same], same, 3], max_tokens=3, logprobs=0))
        said = own.outcomes["to 90"].tokens
        own.run(ask("goes on", [*LONG, 90, 3, *said, *LONG[40:77]], max_tokens=5, logprobs=1))
        own.run(ask("again", [*LONG, 90, 3, *said, *LONG[40:60], 4], max_tokens=5, logprobs=1))
        return own.outcomes

    settings = {**ROOM, "max_num_batched_tokens": 40}
    with rig(tiny_model(family), **settings) as one:
        want = turns(one)
        counts, hits = one.engine.scheduler.cache.checkpoints.counts, one.engine.scheduler.cache.hit_tokens
    with staged(tiny_model(family), 2, least_piece=least_piece, **settings) as own:
        got = turns(own)
        assert own.errors == []
        assert cut(own) > 5
        cache = own.engine.scheduler.cache
        assert (cache.checkpoints.counts, cache.hit_tokens) == (counts, hits), "it kept other states than one device"
        assert counts.used > 5
        assert_empty(own)
        worker: Stages = own.worker  # type: ignore[assignment]
        rows = [part.plan.rows for parts in worker.dealt for part in parts if len(parts) > 1]
        assert any(each.marks_R is not None and each.marks_R.any() for each in rows), "no piece had a mark inside"
    assert_same(got, want)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["jamba", pytest.param("mamba2", marks=pytest.mark.thorough)])
def test_requests_that_give_way_and_leave(family: str, seed: int, tiny_model: Callable[[str], Path]) -> None:
    """Those who are preempted go on from the state that they left, or from the last one kept before."""
    draw, folder = Random(seed), tiny_model(family)
    prompts = [[*LONG[: draw.randrange(1, 60)], draw.randrange(3, 300)] for _ in range(10)]
    requests = [ask(f"r{n}", prompt, max_tokens=draw.randrange(2, 20)) for n, prompt in enumerate(prompts)]
    with rig(folder, **ROOM) as one:
        want = one.run(*requests)
    with staged(folder, 2, **ROOM) as own:
        own.add(*requests)
        left = disturbed(own, draw, gives_way=0.3, leaves=0.02)
        assert own.errors == []
        assert cut(own) > 0
        assert own.engine.scheduler.cache.checkpoints.counts.used > 0
        assert_empty(own)
    for name, outcome in own.outcomes.items():
        whole = want[name].tokens
        assert outcome.tokens == (whole[: len(outcome.tokens)] if name in left else whole), name


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("zamba2", marks=pytest.mark.thorough)])
def test_processes_give_the_same(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(family)

    def both() -> list[Request]:
        return [*asked(), ask("longer", [*LONG, *LONG[:30]], max_tokens=4, logprobs=1)]

    monkeypatch.setattr(leader, "Dealer", partial(Dealer, least_piece=2))
    with rig(folder, **ROOM) as one:
        want = one.run(*both())
    with rig(folder, **ROOM, pipeline_parallel_size=2) as own:
        got = own.run(*both())
        assert own.errors == []
    assert_same(got, want)
