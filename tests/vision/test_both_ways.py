"""Pictures whose tokens see each other both ways are never cut, whatever bounds a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.assembly.wiring import _most_together
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.step import Span, StepPlan
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.plan_builder import PlanBuilder
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.slots import SlotTable
from ridgeline.engine.together import parts, uncut
from tests.driving import rig
from tests.vision import tiny
from tests.vision.test_pictures import request, requests, words

TinyModel = Callable[[str], Path]
VECTORS = 9  # of a picture


def test_chunks_end_before_or_behind_a_run() -> None:
    runs, builder = ((5, 14), (14, 20)), PlanBuilder(32, SlotTable(1))
    assert [uncut(runs, 0, stop, builder) for stop in (4, 5, 6, 13, 14, 19, 20, 25)] == [4, 5, 5, 5, 14, 14, 20, 25]
    assert uncut(runs, 5, 6, builder) == 14  # it begins there
    assert uncut(runs, 9, 10, builder) == 14  # behind a prefix hit
    builder.budget = 3  # some bound on the step's time leaves so much, though it holds 32
    assert uncut(runs, 5, 8, builder) == 14
    builder.chunks.append(None)  # type: ignore[arg-type]  # another prompt runs in the step
    assert uncut(runs, 5, 8, builder) == 5
    assert uncut(runs, 9, 12, PlanBuilder(4, SlotTable(1))) == 9
    assert parts(runs, 9, 30) == ((0, 5), (5, 11))
    assert parts(runs, 0, 5) == ()


@pytest.mark.parametrize("bound", ["long_prefill_token_threshold", "max_num_partial_prefills"])
def test_a_picture_grows_a_chunk_that_is_too_small(
    bound: str, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, submit = list[StepPlan](), Scheduler._submit

    def noted(self: Scheduler, builder: PlanBuilder) -> StepPlan:
        plans.append(submit(self, builder))
        return plans[-1]

    monkeypatch.setattr(Scheduler, "_submit", noted)
    with rig(tiny_vision("gemma3"), max_num_batched_tokens=16, **{bound: 3}) as own:
        outcomes = own.run(*(each for each, _ in requests("gemma3")))
        for each, pictures in requests("gemma3"):
            assert outcomes[each.id].tokens == tiny.by_transformers("gemma3", each, pictures), each.id
    spans: list[Span] = [span for plan in plans for span in plan.spans]
    assert {end - first for span in spans for first, end in span.both_ways} >= {VECTORS}
    assert all(sum(end - first for first, end in s.both_ways) == sum(e.count for e in s.inserted) for s in spans)
    assert all(plan.num_tokens <= 16 for plan in plans)


def test_what_fits_no_step_is_refused(tiny_vision: TinyModel) -> None:
    """Three other rows may decode in every step."""
    asked, _ = request("gemma3", "x", words(3, 1), tiny.drawn("gemma3", 0))
    with rig(tiny_vision("gemma3"), max_num_batched_tokens=VECTORS + 3) as own:
        own.engine.check(asked)
    with (
        rig(tiny_vision("gemma3"), max_num_batched_tokens=VECTORS + 2) as own,
        pytest.raises(InvalidRequest, match="a picture has 9 tokens, which must run in one step"),
    ):
        own.engine.check(asked)


def test_a_prompt_that_is_seen_whole_runs_in_one_step(tiny_vision: TinyModel) -> None:
    """Its keys are no other prompt's, so the cache keeps nothing of it, but the picture's vectors stay."""
    a = tiny.drawn("paligemma", 0)
    with rig(tiny_vision("paligemma"), max_num_batched_tokens=40, long_prefill_token_threshold=4) as own:
        for name, behind in (("first", words(20, 2)), ("again", words(20, 2)), ("longer", [*words(20, 2), 7])):
            each, pictures = request("paligemma", name, a, behind)
            own.run(each)
            assert own.outcomes[name].tokens == tiny.by_transformers("paligemma", each, pictures), name
        assert own.engine.scheduler.cache.hit_tokens == 0
        assert own.engine.scheduler.pictures.misses == 1
        with pytest.raises(InvalidRequest, match="the prompt has 40 tokens, which must run in one step"):
            own.engine.check(request("paligemma", "x", words(40, 1))[0])
        with pytest.raises(InvalidRequest, match="guidance_scale"):
            own.engine.check(request("paligemma", "x", words(4, 1), guidance_scale=2.0)[0])


def test_trees_of_drafts_are_refused() -> None:
    heads = {"method": "medusa", "model": "heads", "speculative_token_tree": [[0], [1]]}
    with pytest.raises(InvalidConfig, match="draft chains"):
        _most_together(LLMConfig(speculative_config=heads), None, None)  # type: ignore[arg-type]
