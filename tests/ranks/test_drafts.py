"""Drafts on ranks that divide every matrix: each finds and verifies the same ones by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.driving import rig
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
