"""Simulated formats of the KV cache equal the real ones; keys and values each by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ridgeline import LLM
from ridgeline.bench.quality.documents import TextFile
from ridgeline.bench.quality.kv_formats import FORMATS, GROUP, cached_as, stored, study
from ridgeline.bench.quality.likelihood import Cut
from ridgeline.bench.quality.perplexity import Reading, perplexity
from ridgeline.core.errors import InvalidConfig
from tests.bench.quality.conftest import TEXT


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", block_size=4, enforce_eager=True, enable_prefix_caching=False) as built:
        yield built


def reading(llm: LLM) -> Reading:
    return Reading.of(llm, TextFile(Path("a.txt"), (TEXT,)), Cut(32, 16))


def test_every_format_is_scored_for_keys_values_and_both(plain: LLM) -> None:
    scores = study(plain, reading(plain))
    assert len(scores) == 1 + 3 * (len(FORMATS) - 1)
    nats = {(s.keys, s.values): s.score.nats for s in scores}
    assert len(set(nats.values())) == len(nats)
    base = nats["auto", "auto"]
    assert perplexity(plain, reading(plain)).nats == base  # the engine is as before
    off = {name: abs(nats[name, name] - base) for name in FORMATS if name != "auto"}
    assert off["int8"] < off["fp8_e5m2"]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_simulated_format_predicts_as_the_real_one(plain: LLM, folder: Path, name: str) -> None:
    text = reading(plain)
    with cached_as(plain, name, name):
        simulated = perplexity(plain, text).nats
    with LLM(folder, device="cpu", block_size=4, enable_prefix_caching=False, kv_cache_dtype=name) as real:
        assert perplexity(real, text).nats == pytest.approx(simulated, rel=1e-4)
    assert abs(simulated - perplexity(plain, text).nats) > 1e-3 * simulated * 1e-2


def test_int4_has_sixteen_even_steps_in_each_group() -> None:
    x = torch.randn(50, 2 * GROUP)
    kept = stored(x, "int4")
    for group, numbers in zip(
        x.unflatten(-1, (2, -1)).flatten(0, 1), kept.unflatten(-1, (2, -1)).flatten(0, 1), strict=True
    ):
        assert len(numbers.unique()) <= 16
        assert (group - numbers).abs().max() <= (group.max() - group.min()) / 30 * 1.001
    assert torch.equal(stored(torch.ones(3, 8), "int4"), torch.ones(3, 8))


def test_an_engine_that_cannot_simulate_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match="enforce_eager"), cached_as(llm, "int8", "int8"):
        pass
    with pytest.raises(InvalidConfig, match="unknown format of keys or values 'fp4'; known: auto, fp8_e4m3"):
        stored(torch.ones(2, 8), "fp4")
