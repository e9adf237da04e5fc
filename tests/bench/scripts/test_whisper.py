"""The measurement of Whisper's shapes, with one that is small enough for a CPU."""

from __future__ import annotations

from argparse import Namespace

import pytest

from ridgeline_bench.scripts import speech_stream, whisper
from ridgeline_bench.scripts.speech_stream import Shown


def test_windows_are_counted_in_seconds_of_sound() -> None:
    asked = Namespace(model="tiny", windows=2, tokens=3, rounds=2, together=1)
    bench = whisper.SpeechBench(asked.model, asked.windows, asked.together, "cpu")
    line = whisper.measured(bench, asked)
    assert line["seconds_of_sound"] == 60
    assert len(line["wall_s"]) == 2
    assert line["times_real_time"] == 60 / min(line["wall_s"])
    assert all(took > 0 for took in (line["again_s"], *line["pieces_ms"].values()))


def test_a_words_delay_ends_where_it_is_shown_for_good() -> None:
    texts = (("call", 1.0), ("call peter", 2.0), ("all peter now", 3.0), ("call peter now", 4.0))
    shown = [Shown(text, at, 0.5) for text, at in texts]
    found = speech_stream.delays(shown, [(0.5, 0), (1.5, 1), (2.5, 2), (3.5, 7)])
    assert found == pytest.approx([4.0, 1.0, 1.0])  # the first word was another one behind 3 s; no text has an eighth
    assert speech_stream.changed(shown) == (1, 6)
