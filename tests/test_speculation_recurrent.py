"""Drafts change nothing for models with states that every token replaces: the state behind the last accepted token is
that of plain decoding, wherever a step that verifies ends."""

from __future__ import annotations

import pytest

from tests.test_speculation import LOOKUP, TinyModel, check_same, plain, requests, scripted
from tests.driving import rig

FAMILIES = (
    "qwen3_next", "qwen3_5", "mamba", "mamba2", "falcon_mamba", "bamba", "jamba", "falcon_h1", "nemotron_h",
    "granite_hybrid", "zamba2", "lfm2", "rwkv",
)  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token(family: str, share: float, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    want, asked = plain(folder), requests(0)
    with rig(folder, speculative_config=LOOKUP) as own:
        scripted(own, want, asked, share)
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["draft_tokens"] > 0
        if share == 1.0:
            assert 60 < counts["draft_tokens"] - 3 <= counts["accepted_tokens"]
