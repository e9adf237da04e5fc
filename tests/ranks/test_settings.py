"""Settings of ranks that are refused before a process is started."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline import LLM
from ridgeline.assembly import rank
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.defaults import device_of_rank
from ridgeline.parallel.processes import ProcessAxis
from ridgeline.ranks import recruits
from ridgeline.weights.loader import read_model_config


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": (3, 4)}, "pipeline_layer_partition"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "init_expert_location": 5},
            "init_expert_location",
        ),
        ({"tensor_parallel_size": 2, "distributed_timeout_seconds": 1e-9}, "distributed_timeout_seconds"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        device_of_rank(LLMConfig(model="", device="cpu", **settings), 0)


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("llama", {"tensor_parallel_size": 2, "max_model_len": 1 << 20}, "max_model_len 1048576 is more than"),
        ("llama", {"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the model's 4 attention heads"),
        (
            "llama",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel with tensor_parallel_size 2 is to divide experts, and the model has none",
        ),
        (
            "qwen3_moe",
            {"data_parallel_size": 3, "enable_expert_parallel": True},
            r"enable_expert_parallel with data_parallel_size 3 does not divide the model's \d+ experts",
        ),
    ],
)
def test_what_a_model_cannot_is_refused_before_ranks_start(
    family: str,
    settings: dict[str, Any],
    sentence: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.nowhere")
    with pytest.raises(InvalidConfig, match=sentence), LLM(tiny_model(family), device="cpu", **settings):
        pass


def test_experts_that_nobody_divides_are_a_line_in_the_log(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM accepts the setting on one device."""
    with (
        caplog.at_level(logging.INFO, logger="ridgeline"),
        LLM(tiny_model("qwen3_moe"), device="cpu", skip_tokenizer_init=True, enable_expert_parallel=True),
    ):
        assert "enable_expert_parallel divides nothing" in caplog.text


@pytest.mark.parametrize("chunked", [True, False])
def test_experts_of_other_gpus_have_room_for_the_tokens_of_a_step(
    chunked: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found = read_model_config(tiny_model("mixtral")).spec, list[int]()

    def exchange(*_: Any, most: int, **__: Any) -> None:
        found.append(most)

    monkeypatch.setitem(sys.modules, "ridgeline.parallel.peer_exchange", SimpleNamespace(PeerExchange=exchange))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0))
    ranks = object.__new__(ProcessAxis)
    ranks.size = 2
    config = LLMConfig(model="", enable_chunked_prefill=chunked)
    rank._exchange(config, replace(spec, max_position_embeddings=100_000), ranks, torch.device("cuda"))
    assert (found[0] == 100_000) is not chunked
