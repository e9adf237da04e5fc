"""The measurement of drafts draws with seeds above temperature 0, and counts what was accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.speculation import Asked, acceptance, row_length, settings_of, way


def test_acceptance_is_the_share_of_drafts_that_were_right() -> None:
    counts = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 10}
    assert (acceptance(counts), row_length(counts)) == (0.25, 2.0)
    assert acceptance({}) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_drafts_at_any_temperature_and_draws_repeat(temperature: float) -> None:
    """At temperature 0 the tokens are those without drafts; above it two runs with the same seeds are alike, and two
    prompts alike get different draws."""
    head = {"method": "eagle3", "model": str(EMBEDDED_MODEL.parent / "embedded-eagle"), "num_speculative_tokens": 4}
    prompt = list(range(20, 60))
    asked: Asked = ([prompt, prompt], 24, [], temperature)
    _, plain = way(settings_of(), 1, None)
    _, drafted = way(settings_of(speculative_config=head), 1, None)
    _, texts, counts = drafted(asked)
    assert texts == drafted(asked)[1]
    assert counts["draft_tokens"] > 0
    assert 0 <= (acceptance(counts) or 0) <= 1
    assert (texts == plain(asked)[1]) or temperature > 0
    assert (texts[0] == texts[1]) == (temperature == 0)


def test_the_page_shows_the_stored_acceptance() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "speculation.md").read_text()
    stored = (root / "benchmarks" / "results" / "heads-temperature-cpu.jsonl").read_text().splitlines()
    lines = {(x["way"], x["temperature"]): x for x in map(json.loads, stored)}
    for way_, name in (("lookup", "prompt lookup"), ("draft", "`embedded-draft`"), ("eagle3", "`embedded-eagle`")):
        pair = [lines[way_, temperature] for temperature in (0.0, 1.0)]
        cells = [f"{acceptance(x['counts']):.0%}" for x in pair] + [f"{row_length(x['counts']):.2f}" for x in pair]
        cells += [str(x["counts"]["drafts"]) for x in pair] + [f"{x['speedup']:.2f}" for x in pair]
        assert f"| {name} | {' | '.join(cells)} |" in page
        assert pair[1]["acceptance"] < pair[0]["acceptance"]
        assert pair[0]["texts_as_plain"] == 1
