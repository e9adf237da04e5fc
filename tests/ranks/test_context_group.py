"""Ranks that divide a request's tokens and the cache between them give the tokens of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Request
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.state import PassingSpec
from ridgeline.defaults import check_divided
from ridgeline.weights.loader import read_model_config
from tests.driving import Outcome, ask, rig
from tests.ranks.test_group import requests

pytestmark = pytest.mark.usefixtures("forked_ranks")

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
        return found, own.worker.figures().experts


def check(got: dict[str, Outcome], want: dict[str, Outcome]) -> None:
    assert got.keys() == want.keys()
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert got[name].finish_reason == outcome.finish_reason
        scores = ([score for _, score in each.scored] for each in (got[name], outcome))
        np.testing.assert_allclose(*scores, atol=1e-4)
        assert len(got[name].prompt) == len(outcome.prompt)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param("llama", {"prefill_context_parallel_size": 2}, marks=pytest.mark.thorough),
        ("llama", {"prefill_context_parallel_size": 3}),
        pytest.param("mistral", {"prefill_context_parallel_size": 2}, marks=pytest.mark.thorough),
        ("qwen3_moe", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3_5_moe", {"prefill_context_parallel_size": 2}),
        pytest.param("jamba", {"prefill_context_parallel_size": 3}, marks=pytest.mark.thorough),
    ],
    ids=["two", "three", "windows", "two by two, with experts", "a hybrid, with experts", "a hybrid on three"],
)
def test_requests_get_the_tokens_of_one_device(
    family: str, ranks: dict[str, int], tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(family)
    mixture = "moe" in family  # whose tallies are equal where neither finds more of a prompt than the other
    want, load = outcomes(folder, enable_prefix_caching=not mixture)
    settings = {"prefill_context_parallel_threshold": 6, "enable_prefix_caching": not mixture, **ranks}
    got, own_load = outcomes(folder, **settings)
    check(got, want)
    if mixture:
        np.testing.assert_array_equal(own_load.total_LE, load.total_LE)


@pytest.mark.dealt
@pytest.mark.usefixtures("crowded")
def test_ranks_hold_as_much_more_and_preempt_as_one_device(tiny_model: Callable[[str], Path]) -> None:
    """Of equal memory two ranks make a cache of twice the tokens. With too little of it requests are preempted."""
    folder, memory = tiny_model("llama"), 1 << 15
    asked = [ask(str(i), LONG[10 * i : 10 * i + 40], max_tokens=30) for i in range(4)]
    with rig(folder, kv_cache_memory=memory) as one:
        capacity = one.engine.layout.num_pages * one.engine.layout.block_size
    with rig(folder) as one:
        want = one.run(*asked)
    divided = {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 6}
    with rig(folder, kv_cache_memory=memory, **divided) as own:
        assert own.engine.layout.num_pages * own.engine.layout.block_size == 2 * capacity
        got = own.run(*asked)
        assert own.errors == []
        assert sum(own.engine.scheduler.preemptions.values()) > 0
    check(got, want)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"deterministic": True}, "deterministic=True and prefill_context_parallel_size=2 do not go together"),
        ({"cascade": True}, "cascade=True and prefill_context_parallel_size=2 do not go together"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' and prefill_context_parallel_size=2 do not go together"),
        ({"enable_expert_parallel": True}, "between the ranks of tensor_parallel_size, which is 1"),
        ({"prefill_context_parallel_threshold": 0}, "prefill_context_parallel_threshold must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(complaint)):
        LLMConfig(prefill_context_parallel_size=2, **settings)


def test_windows_on_gpus_and_states_of_a_step_alone_are_refused(tiny_model: Callable[[str], Path]) -> None:
    windowed = read_model_config(tiny_model("mistral")).spec
    check_divided(windowed, torch.device("cpu"), 2)
    with pytest.raises(InvalidConfig, match="does not divide windows of attention on a GPU yet"):
        check_divided(windowed, torch.device("cuda"), 2)
    passing = replace(windowed, layers=tuple(replace(layer, mixer=Passes()) for layer in windowed.layers))
    with pytest.raises(InvalidConfig, match="divides no passing states"):
        check_divided(passing, torch.device("cpu"), 2)


class Passes:
    """A mixer that keeps nothing."""

    states = (PassingSpec(),)
