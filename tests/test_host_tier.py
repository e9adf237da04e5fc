"""Blocks that leave the device's cache for the host's memory and come back: models of every kind of state give the same
tokens as without, and run fewer.

Every prompt is asked for twice, in a cache that holds two or three of them. So the second time its beginning is in the
host's memory alone.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.engine.price import Price
from ridgeline.serving.processes.placement import environments
from ridgeline.worker.memory import host_memory
from tests.driving import Rig, ask, rig

PROMPTS = [tuple((7 * k + n * n) % 90 + 1 for n in range(40)) for k in range(6)]
SIZE = {"kv_offloading_size": 1 / 64}

# Full attention, windows beside it, latents, and recurrent states alone and beside attention
FAMILIES = ["llama", "mixed", "deepseek_v3", "mamba2", "qwen3_5"]
AXES = ["tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"]


def twice(own: Rig) -> list[list[list[int]]]:
    """Return the tokens of all prompts, of each round."""
    return [
        [own.run(ask(f"{turn} {n}", prompt)).pop(f"{turn} {n}").tokens for n, prompt in enumerate(PROMPTS)]
        for turn in range(2)
    ]


def room(folder: Path) -> int:
    """Return the bytes of a cache in which three of the prompts fit."""
    with rig(folder, kv_cache_memory=1 << 22) as own:
        layout = own.engine.layout
        return (1 + 3 * layout.pages_needed(48, 32)) * layout.page_bytes


def check(folder: Path, memory: int, ranks: int = 1, **settings: Any) -> None:
    """ranks: among so many is each block divided. Tokens are dear here: a GPU computes those of a tiny model in less
    time than it loads them, and would rightly find nothing below."""
    with rig(folder, kv_cache_memory=memory, max_model_len=60) as plain:
        expected = twice(plain)
    with rig(folder, kv_cache_memory=memory // ranks, max_model_len=60, **SIZE, **settings) as own:
        tier = own.engine.scheduler.cache.tier
        assert tier is not None
        tier.price = Price()
        found = twice(own)
        assert tier.counts.saved_blocks > 0
        assert tier.counts.hit >= len(PROMPTS) // 2 * 30  # of each prompt's 40 tokens
        assert not own.errors
        assert own.engine.scheduler.figures().hit_tokens >= tier.counts.hit
    assert found[0] == expected[0] == expected[1]
    assert found[1] == found[0]


@pytest.mark.dealt
@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_round_finds_in_the_hosts_memory_what_the_first_one_wrote(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    check(tiny_model(family), room(tiny_model(family)))


@pytest.mark.dealt
@pytest.mark.parametrize("axis", [AXES[0], *(pytest.param(axis, marks=pytest.mark.thorough) for axis in AXES[1:])])
def test_each_rank_moves_its_own_part(axis: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model("llama"), room(tiny_model("llama")), ranks=2, **{axis: 2})


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_round_on_a_gpu_finds_what_the_first_one_wrote(family: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), room(tiny_model(family)), device="cuda", dtype="float32")


def calls_of_a_steady_step(own: Rig) -> Counter[str]:
    """Return how often each function is entered by the engine's thread, and by the worker's, in ten decode steps."""
    entered = Counter[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "ridgeline" in frame.f_code.co_filename:
            entered[frame.f_code.co_qualname] += 1

    own.add(ask("steady", PROMPTS[0][:9], max_tokens=40))
    for _ in range(8):
        own.step()
    thread = own.worker._thread
    assert thread is not None
    thread.submit(sys.setprofile, note).result()
    sys.setprofile(note)
    try:
        for _ in range(10):
            own.step()
    finally:
        sys.setprofile(None)
        thread.submit(sys.setprofile, None).result()
    own.run()
    return entered


def test_a_tier_that_is_on_and_unused_costs_a_step_two_or_three_short_calls(tiny_model: Callable[[str], Path]) -> None:
    """Each takes some hundred nanoseconds."""
    with (
        rig(tiny_model("llama"), debug_checks=False) as plain,
        rig(tiny_model("llama"), debug_checks=False, **SIZE) as on,
    ):
        before, after = calls_of_a_steady_step(plain), calls_of_a_steady_step(on)
    more = {name: count for name, count in (after - before).items() if count >= 5}
    assert set(more) <= {"HostMemory.prepare", "HostTier.retire", "HostTier.moves"}
    assert sum(more.values()) <= 35


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_offloading_backend": "lmcache"}, "unknown kv_offloading_backend 'lmcache'; use native"),
        ({"kv_offloading_size": -1}, "kv_offloading_size must not be negative"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size must be a finite number, got nan"),
        ({"kv_offloading_size": float("inf")}, "kv_offloading_size must be a finite number, got inf"),
        ({"kv_offloading_size": "much"}, "kv_offloading_size must be a number"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "do not go together: blocks in the host"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLMConfig(**settings)


@pytest.mark.parametrize("size", [1e6, 1e308])
def test_more_than_the_host_has_is_told_before_anything_is_loaded(
    size: float, tiny_model: Callable[[str], Path]
) -> None:
    with (
        pytest.raises(
            InvalidConfig, match=r"kv_offloading_size is 1e\+\d+ GiB, and .* GiB of the host's memory are free"
        ),
        rig(tiny_model("llama"), kv_offloading_size=size),
    ):
        pass


def test_the_tier_and_a_cpus_cache_must_fit_together(tiny_model: Callable[[str], Path]) -> None:
    free = host_memory()
    settings = {"kv_offloading_size": free / 2 / (1 << 30), "kv_cache_memory": free * 2 // 3}
    with (
        pytest.raises(InvalidConfig, match=r"kv_cache_memory is .* free on cpu beside kv_offloading_size"),
        rig(tiny_model("llama"), **settings),
    ):
        pass


def test_engines_side_by_side_must_have_room_for_all_their_tiers() -> None:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2 / 3 / (1 << 30)
    config = ServeConfig(engine={"device": "cpu", "kv_offloading_size": size}, data_parallel_size=2)
    with pytest.raises(InvalidConfig, match=r"for each of 2 engines \(data_parallel_size\), and the host has"):
        environments(config)
    assert len(environments(ServeConfig(engine=config.engine))) == 1
