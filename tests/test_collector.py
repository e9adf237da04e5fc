"""Without garbage collection: what it was before is what it is afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from ridgeline.core.collector import no_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_an_import_of_ours_runs_without_it_and_leaves_it_on() -> None:
    code = """
import gc, sys
import ridgeline
seen = []
gc.callbacks.append(lambda phase, info: seen.append("ridgeline.core.plan.request" in sys.modules))
ridgeline.SamplingParams
gc.collect()
assert all(seen), "a collection came before the module was there"
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
