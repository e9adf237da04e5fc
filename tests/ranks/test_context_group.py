"""Ranks that divide a request's tokens and the cache between them give the tokens of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline.core.request import Request
from tests.driving import Outcome, ask, rig
from tests.ranks.test_group import requests

LONG = [int(token) for token in np.random.default_rng(3).integers(5, 250, 150)]


def all_requests() -> list[Request]:
    """Chunks of long prompts beside decoding requests; blocks that are found again whole and in part."""
    return [
        *requests(),
        ask("long", LONG, max_tokens=10),
        ask("found", [*LONG[:100], 9, 8, 7], max_tokens=10),
        ask("drawn long", LONG[:70], max_tokens=10, seed=4, temperature=1.0, logprobs=2),
    ]


def outcomes(folder: Path, **settings: Any) -> tuple[dict[str, Outcome], Any]:
    with rig(folder, **settings) as own:
        found = own.run(*all_requests())
        assert own.errors == []
        return found, own.worker.expert_load()


def check(got: dict[str, Outcome], want: dict[str, Outcome]) -> None:
    assert got.keys() == want.keys()
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert got[name].finish_reason == outcome.finish_reason
        scores = ([score for _, score in each.scored] for each in (got[name], outcome))
        np.testing.assert_allclose(*scores, atol=1e-4)
        assert len(got[name].prompt) == len(outcome.prompt)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", {"prefill_context_parallel_size": 2}),
        ("llama", {"prefill_context_parallel_size": 3}),
        ("mistral", {"prefill_context_parallel_size": 2}),
        ("qwen3_moe", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["two", "three", "windows", "two by two, with experts"],
)
def test_requests_get_the_tokens_of_one_device(
    family: str, ranks: dict[str, int], tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(family)
    want, load = outcomes(folder)
    got, own_load = outcomes(folder, prefill_context_parallel_threshold=6, **ranks)
    check(got, want)
    assert (load is None) == (own_load is None)


def test_ranks_hold_as_much_more_and_preempt_as_one_device(tiny_model: Callable[[str], Path]) -> None:
    """Of equal memory two ranks make a cache of twice the tokens; with too little of it requests are preempted."""
    folder, memory = tiny_model("llama"), 60_000
    asked = [ask(f"{i}", LONG[10 * i : 10 * i + 40], max_tokens=30) for i in range(4)]
    with rig(folder) as one:
        want = one.run(*asked)
    with rig(folder, kv_cache_memory=2 * memory) as one:
        held = one.engine.memory
    with rig(folder, kv_cache_memory=memory, prefill_context_parallel_size=2, prefill_context_parallel_threshold=8) as own:
        got = own.run(*asked)
        assert own.errors == []
        print(own.engine.__dict__.keys(), held)
    check(got, want)
