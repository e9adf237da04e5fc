"""The stages of a start, and what they add up to."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ridgeline.core import timeline
from ridgeline.core.timeline import StartStage, Timeline, now


def test_a_process_begins_before_its_first_import_and_after_its_parent_asked() -> None:
    before = now()
    command = "from ridgeline.core import timeline as t; print(t.process_start(), t.FIRST_IMPORT, t.now())"
    told = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True, text=True)
    started, first, last = map(float, told.stdout.split())
    assert before - 0.02 < started <= first <= last  # the kernel counts hundredths of a second
    assert last < now()


def test_what_a_caller_did_between_imports_and_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "process_start", lambda: 100.0)
    monkeypatch.setattr(timeline, "FIRST_IMPORT", 100.5)
    monkeypatch.setattr(timeline, "now", lambda: 4000.0)
    found = Timeline.of_process(103.0)
    found.note("weights", 4000.0 - 1.0)
    assert found.stages == [StartStage("python", 0, 0.5), StartStage("imports", 0.5, 3), StartStage("weights", 2, 3)]


def test_the_start_of_a_child_begins_with_its_parent_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "process_start", lambda: 101.0)
    monkeypatch.setattr(timeline, "FIRST_IMPORT", 101.5)
    assert Timeline.of_child(100.0).stages == [StartStage("command", 0, 1), StartStage("python", 1, 1.5)]
    assert Timeline.of_child(None).stages == [StartStage("command", 0, 0), StartStage("python", 0, 0.5)]


def test_stages_are_noted_even_where_they_fail() -> None:
    found = Timeline()
    with pytest.raises(ValueError, match="wrong"), found.stage("settings"):
        raise ValueError("wrong")
    with found.stage("weights"):
        time.sleep(0.02)
    assert [stage.name for stage in found.stages] == ["settings", "weights"]
    assert found.stages[1].end - found.stages[1].begin >= 0.02
    assert found.seconds == found.stages[1].end


def test_the_line_names_stages_in_their_order() -> None:
    stages = [StartStage("b", 1, 2.5), StartStage("a", 0, 0.5), StartStage("short", 2.5, 2.501)]
    assert str(Timeline(0.0, stages)) == "2.50 s: a 0.50, b 1.50"
