"""Drafts change nothing for models with states that every token replaces: the state behind the last accepted token is
that of plain decoding, wherever a step that verifies ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.plan.request import Preemption, Request
from ridgeline.worker.state.recurrent import Recurrent
from tests.covering import by_values
from tests.driving import Rig, ask, disturbed, rig
from tests.test_speculation import (
    LOOKUP,
    Always,
    Fickle,
    Outcome,
    TinyModel,
    Turning,
    check_same,
    evenly,
    prompt,
    requests,
    scripted,
)

# each mixer with a state of its own, alone or beside attention
FAMILIES = (
    "qwen3_next", "qwen3_5", "mamba", "mamba2", "falcon_mamba", "bamba", "jamba", "falcon_h1", "nemotron_h",
    "granite_hybrid", "zamba2", "lfm2", "rwkv", "kimi_linear",
)  # fmt: skip
KINDS = ("qwen3_5", "mamba2", "jamba", "zamba2", "lfm2", "rwkv")  # one family for each kind of state, and two hybrids
HEAVY = ("qwen3_5", "mamba2", "lfm2")
SETTINGS: dict[str, dict[str, Any]] = {
    "small chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "small blocks": {"max_num_seqs": 2, "block_size": 2, "scheduling_policy": "priority"},
    "many checkpoints": {"block_size": 2, "state_checkpoint_interval": 4},
    "little memory": {"kv_cache_memory": 1 << 17},
}


def rarely(*case: Any, always: bool) -> Any:
    """Return a case that is run with the thorough ones only, unless `always`."""
    return pytest.param(*case, marks=() if always else pytest.mark.thorough)


def some(left_out: tuple[str, ...] = ()) -> list[Request]:
    """Requests of each kind that runs otherwise than a greedy one."""
    wanted = ("greedy", "short", "random", "penalized", "stops", "guided", "paced", "scored", "shares", "shares too")
    return [each for each in requests(0) if each.id in wanted and each.id not in left_out]


def unlike(folder: Path, asked: list[Request], share: float, **settings: Any) -> tuple[dict[str, Outcome], Any]:
    """Check that drafts change no outcome, and return the outcomes with the figures of drafts."""
    with rig(folder, **settings) as own:
        want = own.run(*asked)
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        scripted(own, want, asked, share)
        check_same(own.run(*asked), want)
        assert not own.errors
        return want, own.engine.scheduler.figures().drafts


@pytest.mark.parametrize("family", [rarely(family, always=family in KINDS) for family in FAMILIES])
def test_drafts_change_no_token(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    _, counts = unlike(folder, some(("guided", "shares too", "short")), 0.7)
    assert 20 < counts["accepted_tokens"] < counts["draft_tokens"]


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize("family", HEAVY)
def test_drafts_may_be_right_always_or_never(family: str, share: float, tiny_model: TinyModel) -> None:
    _, counts = unlike(tiny_model(family), some(), share)
    if share == 1.0:  # a right draft that ends its request has no token behind it that would tell
        assert 40 < counts["draft_tokens"] - 4 <= counts["accepted_tokens"]
    else:
        assert counts["accepted_tokens"] < 0.1 * counts["draft_tokens"]


def test_lookup_finds_the_drafts_of_recurrent_models(tiny_model: TinyModel) -> None:
    # greedy rows choose among two tokens alone, so that what they choose repeats soon
    asked = [ask(str(n), prompt(30, n), max_tokens=40, logit_bias={7: 100.0, 9: 100.0}) for n in range(3)]
    want = plain_of(tiny_model("mamba2"), asked)
    with rig(tiny_model("mamba2"), speculative_config=LOOKUP) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*asked), want)
        counts = own.engine.scheduler.figures().drafts
    assert counts is not None
    assert counts["accepted_tokens"] > 0


def plain_of(folder: Path, asked: list[Request], **settings: Any) -> dict[str, Outcome]:
    with rig(folder, **settings) as own:
        return own.run(*asked)


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        rarely(settings, family, always=HEAVY[place % len(HEAVY)] == family)
        for place, settings in enumerate(SETTINGS)
        for family in HEAVY
    ],
)
def test_settings_change_no_token(settings: str, family: str, tiny_model: TinyModel) -> None:
    unlike(tiny_model(family), some(), 0.8, **SETTINGS[settings])


@pytest.mark.parametrize(("family", "seed"), [("qwen3_5", 0), ("mamba2", 1), ("falcon_h1", 2)])
def test_requests_that_give_way_or_leave_change_nothing_for_others(
    family: str, seed: int, tiny_model: TinyModel
) -> None:
    folder, draw, asked = tiny_model(family), random.Random(seed), some()
    want = plain_of(folder, asked)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, 0.7)
        own.add(*asked)
        left = disturbed(own, draw, gives_way=0.25, leaves=0.02)
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]


def test_who_gives_way_while_it_verifies_goes_on_from_where_it_came_to(tiny_model: TinyModel) -> None:
    """Its plans in flight may have brought fewer tokens than they could."""
    request = ask("a", prompt(30, 1), max_tokens=40)
    want = plain_of(tiny_model("qwen3_5"), [request])
    with rig(tiny_model("qwen3_5"), speculative_config=LOOKUP) as own:
        scheduler = own.engine.scheduler
        scripted(own, want, [request], 0.6)
        own.add(request)
        [seq] = scheduler._by_id.values()
        again = []
        while own.engine.has_work:
            own.step()
            if seq.slot >= 0 and len(seq.tokens) > 36 + 12 * len(again) and seq in scheduler.running.decoding:
                scheduler._preempt(seq, Preemption.BLOCKS)
                again.append(len(seq.tokens))
                while seq.slot < 0 and own.engine.has_work:
                    own.step()
                assert seq.cached_tokens >= again[-1] - 1, "it ran again what it had"
        check_same(own.outcomes, want)
    assert len(again) == 3


def test_rows_may_stop_verifying_while_drafts_are_under_way(tiny_model: TinyModel) -> None:
    folder, asked = tiny_model("qwen3_5"), some()
    want = plain_of(folder, asked)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, 0.6)
        own.engine.scheduler.running.drafting = Fickle()  # type: ignore[assignment]
        check_same(own.run(*asked), want)
        assert not own.errors


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2"])
def test_conversations_go_on_from_states_that_verified_rows_left(family: str, tiny_model: TinyModel) -> None:
    """At the end of a turn, which is in the middle of a block, and at checkpoints inside an answer."""
    folder, settings = tiny_model(family), {"state_checkpoint_interval": 8, "block_size": 4}

    def talk(own: Rig, share: float | None, told: list[dict[str, Outcome]]) -> list[dict[str, Outcome]]:
        said, found = prompt(21, 3), []
        for turn in range(3):
            branch = said[: len(said) - 9 * (turn == 2)] + prompt(
                3, turn
            )  # the last one leaves from an answer's middle
            asked = [ask(f"{turn}{kind}", branch, max_tokens=22, seed=turn, **params) for kind, params in ASKED]
            if share is not None:
                scripted(own, told[turn], asked, share)
            own.outcomes = {}
            found.append(own.run(*asked))
            said = branch + found[-1][f"{turn}a"].tokens
        return found

    with rig(folder, **settings) as own:
        want = talk(own, None, [])
    for share in (1.0, 0.6):
        with rig(folder, speculative_config=LOOKUP, **settings) as own:
            for got, plainly in zip(talk(own, share, want), want, strict=True):
                check_same(got, plainly)
            cache = own.engine.scheduler.cache
            assert cache.hit_tokens > 80
            assert cache.checkpoints.counts.used > 3


ASKED: tuple[tuple[str, dict[str, Any]], ...] = (("a", {}), ("b", {"temperature": 0.8}))


@pytest.mark.parametrize(("family", "buckets"), by_values(("qwen3_5", "mamba", "rwkv", "zamba2"), (False, True)))
def test_even_steps_change_no_token(
    family: str, buckets: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where nothing depends on what the host knows."""
    folder, asked = tiny_model(family), some(("guided", "paced"))
    want = plain_of(folder, asked)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, 0.7)
        evenly(own, monkeypatch if buckets else None)
        own.engine.scheduler.running.drafting = Turning()  # type: ignore[assignment]
        check_same(own.run(*asked), want)
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["accepted_tokens"] > 20
        if buckets:
            replayed = [graph for graph in own.runner.launch.graphs._graphs.values() if graph.replays]  # type: ignore[union-attr, attr-defined]
            assert any(graph.drafts is not None for graph in replayed)


def test_a_model_with_attention_drafts_for_a_recurrent_one(tiny_model: TinyModel) -> None:
    folder, asked = tiny_model("qwen3_5"), some()
    speculation = {"method": "draft_model", "model": tiny_model("llama"), "num_speculative_tokens": 3}
    for settings in ({}, SETTINGS["many checkpoints"]):
        want = plain_of(folder, asked, **settings)
        with rig(folder, speculative_config=speculation, **settings) as own:
            own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
            check_same(own.run(*asked), want)
            counts = own.engine.scheduler.figures().drafts
            assert not own.errors
        assert counts is not None
        assert counts["draft_tokens"] > 0


def test_states_behind_drafts_lie_in_memory_of_no_request(tiny_model: TinyModel) -> None:
    with rig(tiny_model("jamba")) as own:
        plainly = own.engine.layout
    with rig(tiny_model("jamba"), speculative_config=LOOKUP) as own:
        layout, states = own.engine.layout, own.runner.segments.states
        [group] = [group for group in states.groups if isinstance(group, Recurrent)]
        blocks = group._scratch_N.tolist()
        assert len(set(blocks)) == layout.scratch == 4 * LOOKUP["num_speculative_tokens"]
        pages = {layout.page_of(states.groups.index(group), block) for block in blocks}
        assert pages == set(range(layout.num_pages, layout.all_pages))
        assert states.memory.bytes.numel() == layout.all_pages * layout.page_bytes
    assert plainly.all_pages == plainly.num_pages
