"""The measurement of Whisper's shapes, with one that is small enough for a CPU."""

from __future__ import annotations

from argparse import Namespace

from ridgeline_bench.scripts import whisper


def test_windows_are_counted_in_seconds_of_sound() -> None:
    asked = Namespace(model="tiny", windows=2, tokens=3, rounds=2, together=1)
    bench = whisper.SpeechBench(asked.model, asked.windows, asked.together, "cpu")
    line = whisper.measured(bench, asked)
    assert line["seconds_of_sound"] == 60
    assert len(line["wall_s"]) == 2
    assert line["times_real_time"] == 60 / min(line["wall_s"])
    assert all(took > 0 for took in (line["again_s"], *line["pieces_ms"].values()))
