"""Drafts by a model where steps are even, as on a GPU, and their width changes all the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.driving import ask, disturbed, rig
from tests.test_draft_model import drafting, watch
from tests.test_speculation import Turning, check_same, evenly, prompt

TinyModel = Callable[[str], Path]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_key_is_lost_while_widths_change(
    family: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is never wrong: behind steps that made fewer drafts than the next one verifies or
    more, behind tokens that waited, and where requests give way. No request finds cached keys, which may lack some."""
    folder = tiny_model(family)
    asked = [
        ask("greedy", prompt(30, 1), max_tokens=50),
        ask("chunks", prompt(70, 2), max_tokens=40),
        ask("random", prompt(21, 4), max_tokens=50, temperature=0.8, seed=11),
        ask("filtered", prompt(17, 5), max_tokens=60, temperature=0.8, top_p=0.9, top_k=40, seed=5),
    ]
    with rig(folder, enable_prefix_caching=False) as own:
        want = own.run(*asked)
    with rig(folder, enable_prefix_caching=False, **drafting(folder, 5)) as own:
        evenly(own, monkeypatch)
        own.engine.scheduler.running.drafting = turning = Turning()  # type: ignore[assignment]
        turning.most = 5
        watch(own)
        own.add(*asked)
        disturbed(own, Random(0), gives_way=0.2, leaves=0.0)
        check_same(own.outcomes, want)
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["accepted_tokens"] == counts["draft_tokens"] > 50
