"""The command that shows how a model's graph is divided."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command import run_here


def test_the_questions_have_answers(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder, svg, html = tiny_model("llama"), tmp_path / "graph.svg", tmp_path / "graph.html"
    ran = run_here("shard-graph", folder, "--dtype", "float32", "--svg", svg, "--html", html)
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout
    assert (
        "decoder.layers.0.feed_forward.gate_up.weight  224 x 64  (tp:2, -)  annotated  28,672 of 57,344 bytes" in told
    )
    assert "decoder.final_norm.weight  64  (-)  whole  256 of 256 bytes" in told
    assert "all_gather[tp, dim 1]  of 16 x 160 (-, tp)  behind or for the output: 10,240 bytes" in told
    assert "5 all-reduce: a rank sends 20,480 bytes" in told
    picture = ElementTree.parse(svg).getroot()
    titles = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("all_reduce" in title for title in titles) >= 5
    page = html.read_text()
    assert "<svg" in page
    assert "decoder.layers.1.mixer.qkv.weight" in page


def test_annotations_are_spread_and_printed(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    asked = ("--shard", "*.gate_up.weight=tp:112/112,-", "--layers", "1", "--tokens", "8")
    made = json.loads(run_here("shard-graph", folder, *asked, "--json").stdout)
    ways = {each["name"].removeprefix("decoder.layers.0."): each["because"] for each in made["inputs"]}
    assert (ways["feed_forward.gate_up.weight"], ways["feed_forward.down.weight"]) == ("annotated", "deduced")
    assert ways["mixer.qkv.weight"] == "whole"
    assert made["totals"] == {"all_reduce": [1, 8 * 64 * 2]}
    text = run_here("shard-graph", folder, *asked, "--print-after", "overlap").stdout
    assert "begin all_reduce[tp, sum]" in text
    assert "sum over tp" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--mesh", "tp"), "is no mesh"),
        (("--shard", "no"), "takes NAME=LAYOUT"),
        (("--shard", "no=tp,-"), "no tensor is called 'no'"),
        (("--layers", "9"), "more than the model's 2"),
        (("--tokens", "7", "--batch", "2"), "not 2 sequences"),
        (("--print-after", "fuse"), "no step 'fuse'"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--mesh", "tp=3"), "not divisible|do not divide|does not divide"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    asked: tuple[str, ...], said: str, tiny_model: Callable[[str], Path]
) -> None:
    ran = run_here("shard-graph", tiny_model("llama"), *asked)
    assert ran.returncode == 2
    assert re.search(said, ran.stderr), ran.stderr


def test_a_mixture_is_refused(tiny_model: Callable[[str], Path]) -> None:
    ran = run_here("shard-graph", tiny_model("mixtral"), "--shard", "*.unembed.weight=tp,-")
    assert (ran.returncode, "experts get rows by their scores" in ran.stderr) == (2, True)
