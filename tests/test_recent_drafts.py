"""Drafts from what other requests wrote: they change no token, come from the first one on, and stay with the tenant."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.plan.request import Preemption, Request
from ridgeline.worker.speculation.lookup import Lookup
from tests.driving import Outcome, Rig, ask, rig
from tests.test_speculation import DRAFTS, LOOKUP, Always, Turning, check_same, evenly, plain, requests
from tests.test_triton_engine import TRITON

TinyModel = Callable[[str], Path]
RECENT = {**LOOKUP, "lookup_recent_tokens": 4096}
LONG = {**RECENT, "prompt_lookup_min": 3}  # short matches in a request's own text count for nothing
VOCABULARY = 300  # tokens that all tiny models have


def again(asked: Sequence[Request], turn: int = 2) -> list[Request]:
    return [replace(each, id=f"{each.id} {turn}") for each in asked]


def named(outcomes: dict[str, Outcome], turn: int = 2) -> dict[str, Outcome]:
    """The outcomes of that turn, by the names of the first one."""
    return {name.removesuffix(f" {turn}"): each for name, each in outcomes.items() if name.endswith(f" {turn}")}


def accepted(own: Rig) -> int:
    counts = own.engine.scheduler.figures().drafts
    assert counts is not None
    return counts["accepted_tokens"]


def novel(name: str, length: int = 24, **params: Any) -> Request:
    """A request whose prompt and text do not repeat themselves."""
    draw = random.Random(1)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(15)]
    return ask(name, prompt, max_tokens=length, temperature=1.0, seed=7, **params)


def steps(own: Rig, *asked: Request) -> int:
    """Run requests. Return how many steps emitted something."""
    before = len(own.results)
    own.run(*asked)
    return sum(int(result.emitted_R.sum()) > 0 for result in own.results[before:] if len(result.emitted_R))


@pytest.mark.dealt
@pytest.mark.parametrize(
    "family", ["mixed", "lfm2", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("llama", "gpt2"))]
)
def test_what_others_wrote_changes_no_token(family: str, tiny_model: TinyModel) -> None:
    folder, right = tiny_model(family), {}
    want = plain(folder)
    for name, config in (("own", LOOKUP), ("recent", RECENT)):
        with rig(folder, speculative_config=config) as own:
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            first = requests(own.runner.decoder.spec.vocab_size)
            check_same(own.run(*first), want)
            before = accepted(own)
            check_same(named(own.run(*again(requests(own.runner.decoder.spec.vocab_size)))), want)
            right[name] = accepted(own) - before
    assert right["recent"] > 1.2 * right["own"]


def test_a_text_that_somebody_wrote_is_drafted_from_its_first_token_on(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), speculative_config=LONG) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        assert steps(own, novel("a")) > 20
        before = accepted(own)
        assert steps(own, novel("b")) == 7  # the prompt's token, five of four, and one of three
        assert accepted(own) - before == 5 * DRAFTS + 2
        assert own.outcomes["a"].tokens == own.outcomes["b"].tokens


def test_tenants_find_nothing_of_each_other(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), speculative_config=LONG) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        plain_steps = steps(own, replace(novel("a"), cache_salt="one"))
        assert steps(own, replace(novel("b"), cache_salt="two")) == plain_steps > 20
        assert steps(own, novel("c")) == plain_steps
        assert steps(own, replace(novel("d"), cache_salt="one")) <= 9  # a few entries may have met
        assert steps(own, replace(novel("e"), cache_salt="\ud800")) == plain_steps  # no UTF-8 has this character


def test_sleep_leaves_the_table_as_it_is(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), speculative_config=LONG) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        own.run(novel("a"))
        own.engine.pause()
        own.engine.sleep()
        own.engine.wake()
        own.engine.resume()
        assert steps(own, novel("b")) == 7


def test_the_oldest_is_forgotten(tiny_model: TinyModel) -> None:
    """64 places hold the newest of some hundred tokens."""
    with rig(tiny_model("llama"), speculative_config={**LONG, "lookup_recent_tokens": 16}) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        proposer = own.runner.proposer
        assert isinstance(proposer, Lookup)
        assert proposer.recent is not None
        assert len(proposer.recent.next_H) == 64
        own.run(novel("a"))
        own.run(*(ask(f"o{i}", [i + 3] * 3, max_tokens=60, temperature=1.0, seed=i) for i in range(8)))
        assert steps(own, novel("b")) > 15
        assert steps(own, novel("c")) < 15


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_give_way_or_leave_change_nothing_for_others(seed: int, tiny_model: TinyModel) -> None:
    folder, draw = tiny_model("mixed"), random.Random(seed)
    want = plain(folder)
    with rig(folder, speculative_config=RECENT) as own:
        scheduler = own.engine.scheduler
        for turn in (1, 2):
            own.add(*again(requests(own.runner.decoder.spec.vocab_size), turn))
            for _ in range(2000):
                if not own.engine.has_work:
                    break
                running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
                if running and draw.random() < 0.25 and scheduler.preemptions.total() < 12 * turn:
                    scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
                own.step()
            assert not own.engine.has_work
            check_same(named(own.outcomes, turn), want)
        assert scheduler.preemptions.total() > 6


@pytest.mark.dealt
@pytest.mark.parametrize("buckets", [False, True], ids=["op by op", "in buckets"])
def test_even_steps_change_no_token(buckets: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a step verify drafts or none does, as on a GPU."""
    folder, right = tiny_model("llama"), {}
    want = {name: each for name, each in plain(folder).items() if name not in ("masked", "guided", "named")}
    for name, config in (("own", LOOKUP), ("recent", RECENT)):
        with rig(folder, speculative_config=config) as own:
            evenly(own, monkeypatch if buckets else None)
            own.engine.scheduler.running.drafting = Turning()  # type: ignore[assignment]
            mine = [each for each in requests(own.runner.decoder.spec.vocab_size) if each.id in want]
            check_same(own.run(*mine), want)
            before = accepted(own)
            check_same(named(own.run(*again(mine))), want)
            right[name] = accepted(own) - before
    assert right["recent"] > right["own"]


def test_behind_lookup_another_proposer_drafts_what_nobody_wrote(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    want = plain(folder)
    with rig(folder, speculative_config={**RECENT, "method": "layer_skip", "skip_layers": [1]}) as own:
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        check_same(named(own.run(*again(requests(own.runner.decoder.spec.vocab_size)))), want)


@pytest.mark.dealt
def test_triton_kernels_find_what_the_plain_ops_find(tiny_model: TinyModel) -> None:
    found = []
    for kernels in ({}, TRITON):
        with rig(tiny_model("llama"), kernels=kernels, speculative_config=LONG) as own:
            evenly(own)
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            own.run(novel("a", 9), novel("b", 12))
            own.run(novel("c", 12), novel("d", 9, logprobs=1))
            assert not own.errors
            found.append(({name: each.tokens for name, each in own.outcomes.items()}, accepted(own)))
    assert found[0] == found[1]
    assert found[0][1] > 10
