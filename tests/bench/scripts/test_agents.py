"""Agents that call tools: their texts and the least work by hand, and an engine that runs no token twice."""

from __future__ import annotations

import pytest

import ridgeline
from ridgeline_bench.scripts import agents
from ridgeline_bench.scripts.agents import Answer, Step, Work, generator, played
from ridgeline_bench.scripts.driven import Driven

WORK = Work(agents=2, steps=4, shared=48, task=5, result=6, call=3, branches=3, every=2)


def prefixes(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}


def test_the_least_work_is_each_prefix_once() -> None:
    """A token counts if no text has had this token behind the same ones, and ran it: calls end with one that did not.
    Of branches that come at once the common ones count once."""
    seen: set[tuple[int, ...]] = set()
    least: list[int] = []

    def generate(prompts: list[list[int]]) -> list[Answer]:
        new = prefixes(prompts) - seen
        least.append(len(new))
        answers = [Answer(0, (7, 8, 1000 + number)) for number in range(len(prompts))]
        ran = [[*prompt, *answer.tokens[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
        seen.update(prefixes(ran))
        return answers

    steps = list(played(WORK, generate, vocabulary=900))
    assert [step.least for step in steps] == least
    assert least == [48 + 2 * 5 + 2 * 6, 2 + 2 * 3 * 6, 2 + 2 * 6, 2 + 2 * 3 * 6]
    assert [step.prompts for step in steps] == [2 * 59, 6 * 68, 2 * 77, 6 * 86]
    assert [step.written for step in steps] == [6, 18, 6, 18]
    assert WORK.longest == 48 + 5 + 4 * (6 + 3)


def test_the_engine_runs_the_least_and_the_last_token_of_a_call_for_each_branch(driven: Driven) -> None:
    """48 shared tokens are whole blocks. Of others the last block would run for each agent that comes at once. In the
    last step the call's last token ends a block, which the first branch fills for the others."""
    generate = generator(driven.llm, ridgeline.SamplingParams, WORK.call)
    steps = list(played(WORK, generate, vocabulary=320, seed=5))
    assert [step.ran - step.least for step in steps] == [0, 2 * 2, 0, 0]
    again: list[Step] = list(played(WORK, generate, vocabulary=320, seed=5))
    assert [step.ran for step in again] == [2, 6, 2, 6], "a prompt that is repeated runs its last token alone"


def test_both_ways_are_measured_on_the_same_texts(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def loaded(engine: str, given: dict[str, object]) -> tuple[object, object]:
        driven.llm.reset_prefix_cache()
        asked_for.append((engine, given["enable_prefix_caching"], given["max_model_len"]))
        return Kept(), ridgeline.SamplingParams

    class Kept:
        def generate(self, *given: object, **more: object) -> object:
            return driven.llm.generate(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(agents, "loaded", loaded)
    lines = list(agents.bench(WORK, "ridgeline", {}, 320))
    assert asked_for == [("ridgeline", True, 105), ("ridgeline", False, 105)]
    assert [line["way"] for line in lines] == ["prefix cache", "no cache"]
    first, second = lines
    assert first["prompt_tokens"] == second["prompt_tokens"] == 118 + 408 + 154 + 516
    assert first["least"] == 70 + 38 + 14 + 38
    assert first["ran"] == first["least"] + 4
    assert 0 < first["later_step_s"] < first["seconds"]
    assert first["written_per_second"] == pytest.approx(48 / first["seconds"])


def test_the_page_has_the_quick_form_s_figures() -> None:
    """Sizes of --quick: 3 agents, 4 steps, 128 shared tokens, tasks and results of 16, calls of 4."""
    work = Work(agents=3, steps=4, shared=128, task=16, result=16, call=4, branches=3, every=4)
    least = sum(map(work.least, range(4)))
    twice = sum(work.agents * (work.width(step) - 1) for step in range(1, 4))
    prompts = sum(work.agents * work.width(step) * (144 + 16 + 20 * step) for step in range(4))
    page = " ".join((agents.SHAPES.parents[1] / "docs" / "experiments.md").read_text().split())
    assert f"{least + twice} of {prompts:,} tokens, where {least} are the least" in page
