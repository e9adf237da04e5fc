"""An API server that is ready has done what a first request would otherwise wait for: its routes are made, and what it
holds is visited by no collection of garbage while it serves."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.apis.app import create_app
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


def test_routes_are_made_before_the_first_request() -> None:
    """A second request takes a hundredth of the first one's time; a tenth is asked for."""
    app, seconds = create_app(cast("Any", SimpleNamespace(config=ServeConfig(), beside=()))), []
    for _ in range(3):
        began = time.process_time()
        asyncio.run(api_server_process.make_routes(app))
        seconds.append(time.process_time() - began)
    assert min(seconds[1:]) < 0.1 * seconds[0]
