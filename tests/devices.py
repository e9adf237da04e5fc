"""The devices that a test runs on: a CPU, and in runs with `-m gpu` a GPU."""

from __future__ import annotations

from typing import Any

import pytest

DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def placed(device: str) -> dict[str, Any]:
    """Return the settings of a tiny model's engine on a device. It does not take a whole GPU, which other tests use
    too."""
    return {"device": device, **({"kv_cache_memory": 1 << 24} if device == "cuda" else {})}
