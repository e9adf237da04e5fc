"""The recogniser that ships: it writes sentences that it never heard, of voices that it never heard, in noise.

The bounds lie above the shares of wrong words that the model's card has, by more than chance moves so few sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ridgeline import LLM
from ridgeline.media.bounds import MediaBounds
from ridgeline.media.pool import Decoders
from ridgeline_bench.scripts.senses.spoken import error_rate
from tests.command import run_here

SPOKEN = Path(__file__).parent / "spoken"  # by `senses.speak`
TEXTS: dict[str, str] = json.loads((SPOKEN / "texts.json").read_text())


@pytest.fixture(scope="module")
def hearing() -> Iterator[LLM]:
    with LLM("embedded-speech", device="cpu", dtype="float32", max_num_seqs=8) as found:
        yield found


@pytest.mark.dealt
def test_sentences_of_unheard_voices_are_written(hearing: LLM) -> None:
    said = [hearing.transcribe(SPOKEN / name).text for name in TEXTS]
    assert error_rate(said, list(TEXTS.values())) < 0.15
    assert error_rate(said[1:] + said[:1], list(TEXTS.values())) > 0.6


@pytest.mark.dealt
def test_speech_ends_where_it_is_said_to(hearing: LLM) -> None:
    """Half a second of noise is behind each sentence."""
    apart = []
    for name in TEXTS:
        found = hearing.transcribe(SPOKEN / name, timed=True)
        apart.append(found.segments[-1].end - (found.seconds - 0.5))
    assert np.median(np.abs(apart)) < 0.15


def test_noise_alone_is_no_speech(hearing: LLM) -> None:
    noise = np.random.default_rng(0).standard_normal(64_000).astype(np.float32) * 0.05
    assert hearing.transcribe((noise, 16_000)).text == ""


def test_a_sound_of_several_windows_is_written_whole(hearing: LLM) -> None:
    decoders = Decoders(MediaBounds())
    sounds = [decoders.sound((SPOKEN / name).read_bytes(), 16_000).samples_N for name in TEXTS]
    said = hearing.transcribe((np.concatenate(sounds), 16_000)).text
    assert error_rate([said], [" ".join(TEXTS.values())]) < 0.3


def test_the_command_transcribes_with_the_shipped_model() -> None:
    name, text = next(iter(TEXTS.items()))
    done = run_here("transcribe", str(SPOKEN / name), "--device", "cpu", "--quiet")
    assert error_rate([done.stdout.strip()], [text]) < 0.35
