"""Drafts on ranks that divide every matrix: each finds and verifies the same ones by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.driving import ask, rig
from tests.test_recent_drafts import accepted, again, named
from tests.test_speculation import LOOKUP, Always, check_same, requests


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_drafts_on_two_ranks_change_no_token(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder, settings = tiny_model(family), {"tensor_parallel_size": 2, "debug_checks": False}
    with rig(folder) as own:
        vocabulary = own.runner.decoder.spec.vocab_size
        want = own.run(*requests(vocabulary))
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests(vocabulary)), want)
        counts = own.engine.scheduler.figures().drafts
    assert counts is not None
    assert counts["draft_tokens"] > counts["accepted_tokens"] > 0


def test_masks_along_drafts_reach_both_ranks(tiny_model: Callable[[str], Path]) -> None:
    """Each rank has the bits of its own part of the vocabulary."""
    folder, settings = tiny_model("llama"), {"tensor_parallel_size": 2, "debug_checks": False}
    asked = [
        ask("two", [7, 8] * 6, allowed_token_ids=(7, 8), max_tokens=20, lookahead=1, logprobs=1),
        ask("far", [7, 290] * 6, allowed_token_ids=(7, 40, 290), max_tokens=20, temperature=1.0, seed=3, lookahead=1),
        ask("bad", [7, 8] * 6, bad_words=[[7, 8], [9]], logit_bias={7: 9.0, 8: 9.0}, max_tokens=20, lookahead=1),
        ask("free", [5, 6] * 6, logit_bias={5: 9.0, 6: 9.0}, max_tokens=20),
    ]
    with rig(folder) as own:
        want = own.run(*asked)
    with rig(folder, speculative_config=LOOKUP, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        given, provide = [], own.worker.provide_masks

        def noting(plan_id: int, masks: Any, drafts: Any = None) -> None:
            given.extend(each.token_ids_D for each in (drafts or {}).values())
            provide(plan_id, masks, drafts)

        own.worker.provide_masks = noting  # type: ignore[method-assign]
        check_same(own.run(*asked), want)
    assert sum(map(len, given)) > 20


def test_ranks_find_the_same_in_what_others_wrote(tiny_model: Callable[[str], Path]) -> None:
    folder, settings = tiny_model("llama"), {"tensor_parallel_size": 2, "debug_checks": False}
    with rig(folder) as own:
        vocabulary = own.runner.decoder.spec.vocab_size
        want = own.run(*requests(vocabulary))
    with rig(folder, speculative_config={**LOOKUP, "lookup_recent_tokens": 64}, **settings) as own:
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        check_same(own.run(*requests(vocabulary)), want)
        for turn in (2, 3):
            check_same(named(own.run(*again(requests(vocabulary), turn)), turn), want)
        assert accepted(own) > 0
