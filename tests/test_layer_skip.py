"""Drafts by the model itself without some of its layers, and lookup in front of another method."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.worker.speculation.lookup_first import LookupFirst
from tests import tiny_models
from tests.driving import Rig, ask, disturbed, rig
from tests.head_oracle import Eagle, Eagle3, Head, Target
from tests.test_draft_heads import GREEDY, LAYERS, Record, drafting, texts_of
from tests.test_draft_model import share
from tests.test_speculation import (
    DRAFTS,
    VOCABULARY,
    Always,
    Fickle,
    Turning,
    check_same,
    evenly,
    plain,
    prompt,
    requests,
)

TinyModel = Callable[[str], Path]


def skipping(*layers: int, **more: Any) -> dict[str, Any]:
    config = {"method": "layer_skip", "skip_layers": list(layers), "num_speculative_tokens": DRAFTS, **more}
    return {"speculative_config": config}


def always(own: Rig, how: type[Always] = Always) -> Rig:
    own.engine.scheduler.running.drafting = how()  # type: ignore[assignment]
    return own


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers 1 and 2 add nothing, so that it is right without them."""
    model = tiny_models.build("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for index in (1, 2):
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("idle")
    model.save_pretrained(folder)
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("buckets", [None, False, True], ids=["cut", "op by op", "in buckets"])
def test_layers_that_do_nothing_are_not_missed(
    buckets: bool | None, idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts are right, so every key is where it should be, also behind steps that verified none."""
    want = plain(idle)
    for how in (Always, Fickle if buckets is None else Turning):
        with rig(idle, **skipping(1, 2)) as own:
            if buckets is not None:
                evenly(own, monkeypatch if buckets else None)
            check_same(always(own, how).run(*requests(own.runner.decoder.spec.vocab_size)), want)
            assert not own.errors
            if how is Always and not buckets:
                assert share(own) > (0.95 if buckets is None else 0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [  # who gives way is the scheduler's choice, and keys of two kinds of layers show whether the passes respect it
        pytest.param(*each, marks=() if each[0] == "mixed" or each == ("qwen3_moe", {}) else pytest.mark.thorough)
        for each in product(("mixed", "gpt2", "qwen3_moe", "gemma4_moe"), ({}, {"kv_cache_memory": 1 << 17}))
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(family: str, settings: dict[str, Any], tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want = plain(folder)
    with rig(folder, **skipping(1), **settings) as own:
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)


@pytest.mark.dealt
@pytest.mark.parametrize("seed", [*range(2), pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ["idle", "mixed"])
def test_requests_that_give_way_or_leave_change_nothing_for_others(
    family: str, seed: int, idle: Path, tiny_model: TinyModel
) -> None:
    """Who comes back finds his keys in the cache, and the drafts of layers that do nothing stay right."""
    folder, draw = idle if family == "idle" else tiny_model(family), random.Random(seed)
    want = plain(folder)
    with rig(folder, **skipping(*((1, 2) if family == "idle" else (1,)))) as own:
        always(own).add(*requests(own.runner.decoder.spec.vocab_size))
        left = disturbed(own, draw, gives_way=0.4, leaves=0.02)
        assert not own.errors
        assert share(own) > (0.9 if family == "idle" else 0)
        check_same({k: v for k, v in own.outcomes.items() if k not in left},
                   {k: v for k, v in want.items() if k not in left})  # fmt: skip
        for name in left:
            assert own.outcomes[name].tokens == want[name].tokens[: len(own.outcomes[name].tokens)]


@pytest.mark.parametrize("family", ["idle", "mixed", "gpt2"])
def test_the_next_of_many_finds_the_whole_models_keys(family: str, idle: Path, tiny_model: TinyModel) -> None:
    """A pass without some layers writes behind what is known: none of that may be found in the prefix cache."""
    folder = idle if family == "idle" else tiny_model(family)
    common = prompt(24, 0)
    first = ask("first", common, max_tokens=24)
    with rig(folder) as own:
        text = [*common, *own.run(first)["first"].tokens]
        others = [ask(f"to {end}", text[:end], max_tokens=9) for end in (20, 30, 41, len(text))]
        want = own.run(*others)
    with rig(folder, **skipping(*((1, 2) if family == "idle" else (1,)))) as own:
        always(own).run(first)
        before = own.engine.scheduler.figures().hit_tokens
        check_same(own.run(*others), want)
        assert own.engine.scheduler.figures().hit_tokens - before > 100
        assert share(own) > (0.9 if family == "idle" else 0)


def test_every_other_layer_is_left_out_unless_the_user_says_otherwise(idle: Path) -> None:
    config = {"method": "layer_skip", "num_speculative_tokens": 2}
    with rig(idle, speculative_config=config) as own:
        assert own.runner.proposer._kept == [0, 2, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([], "skip_layers of speculative_config is [], and the model has 4 layers"),
        ([0, 1, 2, 3], "but not all"),
        ([4], "skip_layers of speculative_config is [4], and the model has 4 layers; name some of 0 to 3"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers: list[int], sentence: str, idle: Path) -> None:
    with pytest.raises(InvalidConfig) as raised, rig(idle, **skipping(*layers)):
        pass
    assert sentence in str(raised.value)


def test_recurrent_layers_are_not_skipped(tiny_model: TinyModel) -> None:
    with (
        pytest.raises(InvalidConfig, match="would let this model's recurrent layers"),
        rig(tiny_model("qwen3_5"), **skipping(1)),
    ):
        pass


@pytest.mark.parametrize("kind", [Eagle, Eagle3], ids=lambda kind: kind.__name__)
def test_behind_lookup_a_head_drafts_as_its_paper_says(kind: type[Head], tmp_path: Path) -> None:
    """For the rows in which lookup finds nothing, which are chosen here."""
    folder = tiny_models.save("llama", tmp_path / "target", num_hidden_layers=LAYERS)
    head = kind(Target(tiny_models.build("llama", num_hidden_layers=LAYERS)))
    asked = drafting(head, head.save(tmp_path / "head"))
    asked["speculative_config"] |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with rig(folder) as own:
        want = own.run(*GREEDY)
    with rig(folder, enable_prefix_caching=False, **asked) as own:
        proposer, draw = own.runner.proposer, random.Random(0)
        assert isinstance(proposer, LookupFirst)
        lookup, looked_up, passes = proposer._lookup, [0], [0]
        find, note, begin = lookup.note, proposer._other.note, proposer._other.passes.begin  # type: ignore[attr-defined]

        def finding(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
            find(out_token_RK, slots_R, *others)
            lookup.drafts_SD[slots_R.long()] = -1
            if draw.random() < 0.5:
                lookup.drafts_SD[slots_R[:: draw.choice((1, 2))].long()] = draw.randrange(VOCABULARY)
            looked_up[0] += int((lookup.drafts_SD[slots_R.long(), 0] >= 0).sum())

        def beginning(*arguments: Any) -> Any:
            passes[0] += 1
            return begin(*arguments)

        lookup.note, proposer._other.passes.begin = finding, beginning  # type: ignore[method-assign, attr-defined]
        record = Record(own)
        record.proposer = proposer._other  # whose drafts are compared
        check_same(got := always(own).run(*GREEDY), want)
        assert proposer._other.note == note
        assert looked_up[0] > 10
        assert passes[0] > 10
    assert record.check(head, texts_of(GREEDY, got)) > 50


@pytest.mark.parametrize("buckets", [None, False, True], ids=["cut", "op by op", "in buckets"])
def test_behind_lookup_a_model_changes_no_token(
    buckets: bool | None, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    config = {"model": folder, "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}
    want = plain(folder)
    with rig(folder, speculative_config=config) as own:
        if buckets is not None:
            evenly(own, monkeypatch if buckets else None)
        check_same(always(own).run(*requests(own.runner.decoder.spec.vocab_size)), want)
        assert not own.errors
        assert share(own) > 0.3


def test_no_pass_is_made_where_lookup_finds_drafts_for_all(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    config = {"model": folder, "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 1}
    with rig(folder, speculative_config=config) as own:
        proposer = own.runner.proposer
        assert isinstance(proposer, LookupFirst)

        def fill(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
            proposer._lookup.drafts_SD[slots_R.long()] = 7

        def fail(*arguments: Any) -> None:
            raise AssertionError("a pass was made")

        proposer._lookup.note, proposer._other.passes.begin = fill, fail  # type: ignore[method-assign, attr-defined]
        always(own).run(ask("a", prompt(9, 1), max_tokens=9))
        assert not own.errors
