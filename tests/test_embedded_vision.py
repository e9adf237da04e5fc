"""The model that ships and sees: its captions of pictures that it never met are true.

The bounds lie below the shares of right facts that the model's card has, by more than chance moves so few pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ridgeline import LLM
from ridgeline_bench.scripts.senses.demo import described
from ridgeline_bench.scripts.senses.drawn import DESCRIBE, KINDS, Artist, DrawnPicture, right_facts
from tests.command import run_here


@pytest.fixture(scope="module")
def seeing() -> Iterator[LLM]:
    with LLM("embedded-vision", device="cpu", dtype="float32", max_num_seqs=16) as found:
        yield found


LEAST = {"shapes": 0.8, "bars": 0.85, "number": 0.7, "word": 0.6}  # shares of right facts


def pictures(kind: str, count: int = 12) -> list[DrawnPicture]:
    random, artist = Random(11), Artist(measuring=True)
    return [artist.draw(random, kind) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_captions_of_unseen_pictures_are_true(seeing: LLM, kind: str) -> None:
    drawn = pictures(kind)
    said = described(seeing, [each.image for each in drawn])
    assert np.mean([right_facts(a, b.caption) for a, b in zip(said, drawn, strict=True)]) > LEAST[kind]
    others = drawn[1:] + drawn[:1]
    assert np.mean([right_facts(a, b.caption) for a, b in zip(said, others, strict=True)]) < 0.5


def test_questions_have_answers_of_their_own(seeing: LLM) -> None:
    drawn = pictures("shapes")
    for question in ("how many shapes are there", "what kind of picture is it"):
        said = described(seeing, [each.image for each in drawn], question)
        true = [dict(each.asked)[question] for each in drawn]
        assert np.mean([a == b for a, b in zip(said, true, strict=True)]) > 0.75


def test_a_larger_picture_says_the_same(seeing: LLM) -> None:
    drawn = pictures("shapes", 6)
    large = described(seeing, [each.image.resize((288, 288)) for each in drawn])
    assert np.mean([right_facts(a, b.caption) for a, b in zip(large, drawn, strict=True)]) > 0.75


def test_the_command_line_shows_files(tmp_path: Path) -> None:
    [drawn] = pictures("bars", 1)
    file = tmp_path / "drawn.png"
    drawn.image.save(file)
    common = ("--model", "embedded-vision", "--device", "cpu", "--json", "--quiet", "--temperature", "0")
    found = run_here("chat", DESCRIBE, "--image", file, *common)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["completions"][0]["text"] == drawn.caption
    missing = run_here("chat", "x", "--image", tmp_path / "none.png", *common)
    assert (missing.returncode != 0, "which is no file" in missing.stderr) == (True, True)
