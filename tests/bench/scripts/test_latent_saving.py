"""The bytes that latents save: what papers say of them, and what blocks hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.scripts.latent_saving import DEFAULT, forms
from tests.models.latent_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V32

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("config", "saving"),
    [(DEEPSEEK_V3, [71.1, 127.6, 80.0]), (DEEPSEEK_V32, [71.1, 127.6, 80.0]), (DEEPSEEK_V2_LITE, [8.9, 16.0, 10.0])],
    ids=["v3", "v3.2, whose index keys are no latents", "v2-lite"],
)
def test_the_saving_is_that_of_papers_and_of_the_engines_blocks(config: dict[str, object], saving: list[float]) -> None:
    model = model_config(config).spec
    latents, eight, alone, whole, wide = forms(model, 64)
    assert [round(whole.token / form.token, 1) for form in (latents, eight, alone)] == saving
    if config is DEEPSEEK_V3:
        assert (round(wide.token / latents.token, 1), round(wide.token / alone.token, 1)) == (56.9, 64.0)
    if config is not DEEPSEEK_V32:
        assert latents.token == kv_bytes_per_token(model, "bfloat16")
        assert eight.token == kv_bytes_per_token(model, "fp8")


def test_folders_that_are_counted_by_default_are_there() -> None:
    for folder, config in zip(DEFAULT, (DEEPSEEK_V3, DEEPSEEK_V2_LITE), strict=True):
        assert read_json(ROOT / folder / "config.json") == config


def test_a_model_without_latents_is_refused_in_one_sentence() -> None:
    model = model_config(read_json(ROOT / "benchmarks/models/llama-1b/config.json")).spec
    with pytest.raises(InvalidConfig, match="no latent attention"):
        next(forms(model, 64))
