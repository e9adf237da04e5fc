"""Eight ranks give the tokens and logprobs of one device: with a head each, and with key heads that several have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from tests import tiny_models
from tests.driving import rig
from tests.parallel.test_covering_design import asked
from tests.ranks.stages import Stages, meshed
from tests.ranks.test_group import check
from tests.ranks.test_pipeline import assert_same

HEADS = {"num_attention_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a key head each": ("llama", {"num_key_value_heads": 8}, {}),
    "four ranks with the same key head": ("qwen3", {"num_key_value_heads": 2}, {}),
    "sinks and experts in parts": ("gpt_oss", {"num_key_value_heads": 8}, {}),
    "an expert each": ("qwen3_moe", {"num_key_value_heads": 4}, {"enable_expert_parallel": True}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if "key head" in name else ()) for name in MODELS]
)
def test_eight_threads_give_what_one_device_gives(name: str, tmp_path: Path) -> None:
    family, shapes, settings = MODELS[name]
    tiny_models.save(family, tmp_path, **HEADS, **shapes)
    with rig(tmp_path) as one:
        want = one.run(*asked())
    with meshed(tmp_path, tensor_parallel_size=8, **settings) as own:
        worker = own.worker
        assert isinstance(worker, Stages)
        held = [each.runner.decoder.spec.layers[0].attention for each in worker.workers]
        assert [(spec.num_heads, spec.num_kv_heads) for spec in held] == [(1, 1)] * 8
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, want)


@pytest.mark.thorough  # eight processes that each import torch
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tensor_parallel_size": 8}),
        ("qwen3_moe", {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=["eight", "four by two, with experts"],
)
def test_eight_processes_give_what_one_device_gives(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_models.save(family, tmp_path, **HEADS)
    options = {"kv_cache_memory": 1 << 19, "enable_prefix_caching": family == "llama"}
    with rig(tmp_path, **options) as one, rig(tmp_path, **options, **settings) as own:
        check(own, one)
