"""The way of a request's first step may become shorter, and not longer unseen."""

from __future__ import annotations

from benchmarks.walk import walk


def test_the_first_step_enters_no_more_files_and_functions_than_it_did() -> None:
    """Lower the numbers when the way has become shorter."""
    caller, worker = walk()
    assert 0 < len(caller.files) <= 37
    assert 0 < len(caller.functions) <= 158
    assert 0 < caller.calls() <= 288
    assert 0 < len(worker.functions) <= 97
    assert caller.entered["engine/engine.py", "Engine.check"] == 1
