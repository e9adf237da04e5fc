"""Settings of ranks that are refused before a process is started."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.config import LLMConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.defaults import device_of_rank


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": (3, 4)}, "pipeline_layer_partition"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "init_expert_location": 5},
            "init_expert_location",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        device_of_rank(LLMConfig(model="", device="cpu", **settings), 0)
