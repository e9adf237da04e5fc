"""The budget of a row of latent attention behind a cached prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.expanded.cost import worth_expanding
from ridgeline_bench.scripts.latent_forms import Rates, flops, mixer_of, table, ways

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
V3 = mixer_of(MODELS / "deepseek-v3")
EQUAL = Rates(dict.fromkeys(("absorbed", "expanded", "made"), 750e12), 4.42e12)
MEASURED = Rates({"absorbed": 327e12, "expanded": 665e12, "made": 700e12}, 4.42e12)


def test_flops_are_those_of_pairs_and_projections() -> None:
    new, cached, heads = 300, 5000, 128
    pairs, causal, made = new * cached, new * (new + 1) // 2, 2 * 512 * 256
    found = {name: flops(each) for name, each in ways(V3, new, cached).items()}
    assert found == {
        "latents": heads * (2176 * (pairs + causal) + made * new),
        "expanded": heads * (640 * (pairs + causal) + made * (new + cached)),
        "both": heads * (2176 * pairs + 640 * causal + 2 * made * new),
    }


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_a_prefix_of_latents_beside_new_keys_and_values_is_never_the_least_work(name: str) -> None:
    """It takes fewer FLOPs than keys and values for 170 new tokens at most, and fewer than latents from 341 on."""
    mixer = mixer_of(MODELS / name)
    for new in (1, 64, 128, 170, 171, 256, 341, 342, 1024, 16_384):
        for cached in (1, 512, 8192, 131_072, 10**6):
            found = ways(mixer, new, cached)
            work = {way: flops(each) for way, each in found.items()}
            assert (work["both"] >= work["expanded"]) or new <= 170
            assert (work["both"] >= work["latents"]) or new > 340
            for rates in (EQUAL, MEASURED):
                seconds = {way: rates.seconds(each) for way, each in found.items()}
                assert seconds["both"] > min(seconds["latents"], seconds["expanded"])
            if new >= 128:
                chosen = worth_expanding([new], [new + cached], key_dim=128, value_dim=128, rank=512)
                assert bool(chosen[0]) == (work["expanded"] < work["latents"])


def test_a_table_has_a_line_for_each_row_and_a_model_without_latents_is_refused() -> None:
    assert table(V3, [64, 256], [2048, 8192, 30_720], MEASURED).row_count == 6
    with pytest.raises(InvalidConfig, match=r"llama-1b has no latent attention; name one such as benchmarks/"):
        mixer_of(MODELS / "llama-1b")
