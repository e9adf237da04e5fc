"""What an API server holds when it is ready is visited by no collection of garbage while it serves."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline.serving.processes import api_server_process


def test_an_api_server_that_is_ready_has_frozen_its_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [[number] for number in range(50_000)]
    visited: list[int] = []
    monkeypatch.setattr(api_server_process, "tell_ready", lambda: visited.append(len(gc.get_objects())))
    try:
        asyncio.run(api_server_process._announce([], cast("Any", SimpleNamespace(started=True))))
        assert gc.get_freeze_count() > len(kept)
        assert visited[0] < 1000
    finally:
        gc.unfreeze()
