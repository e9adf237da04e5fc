"""Drafts by a model. The target itself is the best draft model that there can be: in float32 all of its drafts are
right as long as its keys are where they should be. So the share of right drafts shows whether they are, whatever
happens to a request; and another model's drafts show that tokens never depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import device
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.step import Assign, SetBlocks
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.kernels.step.op import SlotDrafts, SlotTables, StepRows
from ridgeline.weights.folder import EMBEDDED_DRAFT, EMBEDDED_DRAFTS
from ridgeline.worker.speculation.block_head import BlockHead
from ridgeline.worker.speculation.draft_model import DraftModel
from ridgeline.worker.speculation.feature_head import FeatureHead
from tests import tiny_models
from tests.covering import by_values
from tests.driving import Rig, ask, disturbed, rig
from tests.test_speculation import (
    DRAFTS,
    KINDS,
    SETTINGS,
    Always,
    Fickle,
    check_same,
    evenly,
    mainly,
    plain,
    prompt,
    requests,
)

TinyModel = Callable[[str], Path]


def drafting(folder: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    """The settings that let the model of a folder draft."""
    return {"speculative_config": {"method": "draft_model", "model": folder, "num_speculative_tokens": drafts}}


def share(own: Rig) -> float:
    """How many of the drafts that were verified were right."""
    counts = own.engine.scheduler.figures().drafts
    assert counts is not None
    assert counts["draft_tokens"] > 0
    return counts["accepted_tokens"] / counts["draft_tokens"]


def watch(own: Rig) -> None:
    """Let every pass of the network that drafts fail that writes to blocks other than those of its request."""
    proposer, apply = own.runner.proposer, own.runner.slots.apply
    assert isinstance(proposer, DraftModel | FeatureHead | BlockHead)
    told: dict[tuple[int, int], int] = {}  # slot and group → blocks
    real, exact = proposer.passes._ops, [group.spec.exact for group in own.engine.layout.groups]

    def applying(deltas: Any) -> None:
        for delta in deltas:
            if isinstance(delta, Assign):
                told.update({(delta.slot, group): len(ids) for group, ids in enumerate(delta.blocks)})
            elif isinstance(delta, SetBlocks):
                assert told[delta.slot, delta.group] >= delta.start
                end = delta.start + len(delta.block_ids)
                told[delta.slot, delta.group] = max(told[delta.slot, delta.group], end)
        apply(deltas)

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def step_inputs(self, rows: StepRows, slots: SlotTables, drafts: SlotDrafts) -> Any:
            made = real.step_inputs(rows, slots, drafts)
            size, of_T = slots.block_size, rows.slots_R.repeat_interleave(rows.start_R1.diff())
            assert not made.places_AT[:, len(of_T) :].any()
            for token, slot in enumerate(of_T.tolist()):
                for group, place in enumerate(made.places_AT[:, token].tolist()):
                    if exact[group]:  # a state that every token replaces, which the network does not touch
                        continue
                    if made.live_T[token]:
                        table_C = own.runner.slots.block_tables_ASC[group, slot, : told[slot, group]]
                        assert place // size in table_C.tolist()
                        assert place // size != NULL_BLOCK
                    else:
                        assert place // size == NULL_BLOCK
            return made

    proposer.passes._ops = Watching()  # type: ignore[assignment]
    own.runner.slots.apply = applying  # type: ignore[method-assign]


def always(own: Rig) -> Rig:
    own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
    watch(own)
    return own


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the tiny Llama, with the same vocabulary."""
    torch.manual_seed(1)
    return tiny_models.save("llama", tmp_path_factory.mktemp("other"), num_hidden_layers=1)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("family", mainly("mixed", "gemma4_moe"))
def test_a_model_that_drafts_for_itself_is_right(family: str, tiny_model: TinyModel) -> None:
    """Greedy and random draws alike, since both models draw with the same noise. Penalties, which count the tokens
    before, are the draft model's guess, as are tokens that must not stand where it drafts."""
    folder = tiny_model(family)
    want = plain(folder)
    with rig(folder, **drafting(folder)) as own:
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert share(own) > 0.85
    asked = [
        ask("greedy", prompt(30, 1), max_tokens=24),
        ask("chunks", prompt(70, 2), max_tokens=24),
        ask("random", prompt(21, 4), max_tokens=24, temperature=0.8, seed=11),
        ask("filtered", prompt(17, 5), max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=5),
    ]
    with rig(folder, **drafting(folder)) as own:
        always(own).run(*asked)
        assert share(own) > 0.97


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_another_model_is_wrong_and_changes_nothing(family: str, other_model: Path, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder)
    with rig(folder, **drafting(other_model)) as own:
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert share(own) < 0.3


@pytest.mark.few(2)
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    "settings", [{"kv_cache_memory": 1 << 18}, *SETTINGS.values()], ids=["little memory", *SETTINGS]
)
def test_settings_change_no_token(family: str, settings: dict[str, Any], tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder, **settings)
    with rig(folder, **drafting(folder), **settings) as own:
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert share(own) > 0.8


@pytest.mark.parametrize("seed", [1, 3])
def test_requests_that_give_way_or_leave_change_nothing_for_others(seed: int, tiny_model: TinyModel) -> None:
    folder, draw = tiny_model("mixed"), random.Random(seed)
    want = plain(folder)
    with rig(folder, **drafting(folder)) as own:
        always(own).add(*requests(own.runner.decoder.spec.vocab_size))
        left = disturbed(own, draw, gives_way=0.4, leaves=0.03)
        assert not own.errors
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]
        assert share(own) > 0.8


def test_rows_may_stop_drafting_and_begin_again(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixed")
    want = plain(folder)
    with rig(folder, **drafting(folder)) as own:
        always(own).engine.scheduler.running.drafting = Fickle()  # type: ignore[assignment]
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert share(own) > 0.8


@pytest.mark.parametrize(("most", "made"), [(0, False), (DRAFTS, True)])
def test_no_drafts_are_made_behind_a_prompt_while_they_do_not_pay(most: int, made: bool, tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    with rig(folder, **drafting(folder)) as own:
        choice, proposer, passes = Always(), own.runner.proposer, []
        choice.most = most
        own.engine.scheduler.running.drafting = choice  # type: ignore[assignment]
        assert isinstance(proposer, DraftModel)
        draw = proposer._draws.draw
        proposer._draws.draw = lambda *given: (passes.append(given[3]), draw(*given))[1]  # type: ignore[method-assign]
        own.run(ask("a", prompt(30, 1), max_tokens=6))
        assert any(passes) is made


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_a_prefix_hit_finds_the_keys_of_the_draft_model(family: str, tiny_model: TinyModel) -> None:
    """The prompt, and what was written behind drafts: the second request runs nothing of either but its last token."""
    folder = tiny_model(family)
    with rig(folder, **drafting(folder)) as own:
        first = always(own).run(ask("a", prompt(40, 1), max_tokens=24))["a"]
        before = own.engine.scheduler.figures().drafts
        assert before is not None
        longer = [*prompt(40, 1), *first.tokens]
        own.run(ask("b", longer, max_tokens=24, temperature=0.8, seed=3))
        assert own.engine.scheduler.cache.hit_tokens >= len(longer) - 4
        after = own.engine.scheduler.figures().drafts
        assert after is not None
        tried, right = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
        assert right >= tried - 2 > 10


def test_a_draft_never_reaches_beyond_the_longest_context(tiny_model: TinyModel) -> None:
    folder = tiny_model("gpt2")
    with rig(folder) as own:
        limit = own.engine.config.max_model_len
    for room in ({}, {"max_num_seqs": 1}):
        with rig(folder, **drafting(folder, 7), **room) as own:
            assert own.engine.config.max_model_len == limit
            outcome = always(own).run(ask("a", prompt(limit - 9, 1), max_tokens=9))["a"]
        assert (len(outcome.tokens), outcome.finish_reason) == (9, "length")


def test_a_request_that_fills_the_cache_alone_comes_to_its_end(tiny_model: TinyModel) -> None:
    """Beside another one, for whose blocks both must give way in turn."""
    folder = tiny_model("mixed")
    asked = [ask("a", prompt(6, 1), max_tokens=44), ask("b", prompt(7, 2), max_tokens=43)]
    with rig(folder) as own:
        want = own.run(*asked)
    with rig(folder, **drafting(folder), max_model_len=50, max_num_seqs=2) as own:
        layout, ahead = own.engine.layout, own.engine.config.drafted_ahead
        pages = 1 + layout.pages_needed(50 + DRAFTS + ahead, 32 + ahead)
    with rig(
        folder, **drafting(folder), max_model_len=50, max_num_seqs=2, kv_cache_memory=pages * layout.page_bytes
    ) as own:
        check_same(always(own).run(*asked), want)
        assert own.engine.scheduler.preemptions.total() > 0


@pytest.mark.parametrize("method", EMBEDDED_DRAFTS)
def test_the_embedded_model_brings_its_own_drafts(method: str) -> None:
    text = Path(__file__).read_text(encoding="utf-8")[:1500]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 2}
    with LLM(**settings) as llm:
        weights = llm.assembly.memory.weights
        want = llm.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids
    asked = {"method": method, "num_speculative_tokens": 4}
    with LLM(**settings, speculative_config=asked) as llm:
        llm.assembly.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        assert llm.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids == want
        assert llm.assembly.memory.weights > weights
        counts = llm.assembly.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["accepted_tokens"] > 0.3 * counts["draft_tokens"]


@pytest.mark.parametrize(
    ("family", "buckets"),
    [
        *by_values(("mixed", "gpt2"), (False, True), turn=1),
        *(pytest.param("llama", buckets, marks=pytest.mark.thorough) for buckets in (False, True)),
    ],
)
def test_even_steps_change_no_token_and_lose_no_key(
    family: str, buckets: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all rows of a step as many drafts or none, padded to the sizes of captured graphs."""
    folder = tiny_model(family)
    want = plain(folder)
    with rig(folder, **drafting(folder)) as own:
        evenly(own, monkeypatch if buckets else None)
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert not own.errors
        assert share(own) > 0.5  # behind a step without drafts the next one has none that could be right


def test_dummy_weights_are_made_of_the_draft_model_too(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    with rig(folder, **drafting(folder), load_format="dummy") as own:
        always(own).run(ask("a", prompt(20, 1), max_tokens=24))
        assert share(own) > 0.9  # the same shapes and the same seed


def refused(folder: Path, speculative_config: dict[str, Any], **settings: Any) -> str:
    with (
        pytest.raises((InvalidConfig, ModelLoadError)) as raised,
        rig(folder, speculative_config={"num_speculative_tokens": 3, **speculative_config}, **settings),
    ):
        pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_models_that_cannot_draft_are_refused_in_one_sentence(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    assert "and the model ships with none" in refused(folder, {"method": "draft_model"})
    smaller = tiny_models.save("llama", tmp_path / "smaller", vocab_size=330)
    assert "a vocabulary of 330 tokens, and the model one of 320" in refused(folder, {"model": smaller})
    assert "4,096 tokens" in refused(folder, {"model": EMBEDDED_DRAFT})
    shorter = tiny_models.save("llama", tmp_path / "shorter", max_position_embeddings=32)
    assert "set max_model_len to 32" in refused(folder, {"model": shorter})
    assert "recurrent layers" in refused(folder, {"model": tiny_model("mamba2")})
    assert "nowhere' does not exist" in refused(folder, {"model": str(tmp_path / "nowhere")})


def test_limits_without_room_for_drafts_are_refused_before_weights_are_read(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(device, "load_weights", read)
    folder = tiny_model("llama")
    asked = {"model": folder, "num_speculative_tokens": 16}
    assert "4 sequences of 17 tokens each" in refused(folder, asked)
    assert "64 sequences of 4 tokens each" in refused(folder, {"method": "ngram"}, max_num_seqs=64)
