"""Blocks that leave the device's cache for the host's memory and come back: models of every kind of state give the same
tokens as without, and run fewer.

Every prompt is asked for twice, in a cache that holds two or three of them. So the second time its beginning is in the
host's memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.driving import Rig, ask, rig

PROMPTS = [tuple((7 * k + n * n) % 90 + 1 for n in range(40)) for k in range(10)]
SIZE = {"kv_offloading_size": 1 / 64}

# Full attention, windows beside it, latents, and recurrent states alone and beside attention
FAMILIES = ["llama", "mixed", "deepseek_v3", "mamba2", "qwen3_5", "jamba"]


def twice(own: Rig) -> list[list[list[int]]]:
    """Return the tokens of all prompts, of each round."""
    return [
        [own.run(ask(f"{turn} {n}", prompt)).pop(f"{turn} {n}").tokens for n, prompt in enumerate(PROMPTS)]
        for turn in range(2)
    ]


def pages_for(folder: Path, requests: int, **settings: object) -> int:
    """Return the bytes of a cache in which so many of the prompts fit."""
    with rig(folder, kv_cache_memory=1 << 22, **settings) as own:
        layout = own.engine.layout
        return (1 + requests * layout.pages_needed(48, 32)) * layout.page_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_round_finds_in_the_hosts_memory_what_the_first_one_wrote(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(family)
    memory = pages_for(folder, 3)
    with rig(folder, kv_cache_memory=memory, max_model_len=60) as plain:
        expected = twice(plain)
    with rig(folder, kv_cache_memory=memory, max_model_len=60, **SIZE) as own:
        found = twice(own)
        tier = own.engine.scheduler.cache.tier
        assert tier is not None
        assert tier.counts.saved_blocks > 0
        assert tier.counts.hit >= 10 * 30  # of each prompt's 40 tokens
        assert not own.errors
        assert own.engine.scheduler.figures().hit_tokens >= tier.counts.hit
    assert found[0] == expected[0] == expected[1]
    assert found[1] == found[0]
