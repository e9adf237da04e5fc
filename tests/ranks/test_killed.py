"""A rank that is killed takes its group along at once, however ranks divide the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from ridgeline.core.errors import DeviceLost
from tests.driving import ask, rig
from tests.ranks.test_group import step_on

pytestmark = pytest.mark.usefixtures("forked_ranks")

SOON = 20.0  # seconds; notices take one or two, on a machine with other work more


@pytest.mark.parametrize(
    ("family", "divided"),
    [
        ("llama", {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 6}),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=["context", "requests and experts"],
)
def test_the_death_of_a_rank_is_noticed_at_once(
    family: str, divided: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    with rig(tiny_model(family), **divided) as two:
        two.add(ask("long", list(range(5, 100)), max_tokens=120), ask("other", [4, 5], max_tokens=200))
        for _ in range(4):  # of the long prompt's chunks some are left, and the other decodes
            two.step()
        processes = [member._process for member in two.engine._worker._members]  # type: ignore[attr-defined]
        processes[1].kill()
        since = time.monotonic()
        with pytest.raises(DeviceLost, match="rank 1 was ended by SIGKILL"):
            step_on(two)
        assert time.monotonic() - since < SOON
        assert [process.poll() is not None for process in processes] == [True, True]
        assert not two.engine.has_work
        with pytest.raises(DeviceLost):
            two.add(ask("late", [1]))
