"""The measurement of drafts draws with seeds above temperature 0, and counts what was accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.speculation import (
    Asked,
    acceptance,
    by_position,
    page,
    row_length,
    settings_of,
    shuffled,
    way,
)


def test_acceptance_is_the_share_of_drafts_that_were_right() -> None:
    counts = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 10}
    assert (acceptance(counts), row_length(counts)) == (0.25, 2.0)
    assert acceptance({}) is None


@pytest.mark.dealt
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_drafts_at_any_temperature_and_draws_repeat(temperature: float) -> None:
    """At temperature 0 the tokens are those without drafts; above it two runs with the same seeds are alike, and two
    prompts alike get different draws."""
    head = {"method": "eagle3", "model": str(EMBEDDED_MODEL.parent / "embedded-eagle"), "num_speculative_tokens": 4}
    prompt = list(range(20, 60))
    asked = Asked([prompt, prompt], 24, [], temperature)
    _, plain = way(settings_of(), 1, None)
    _, drafted = way(settings_of(speculative_config=head), 1, None)
    found = drafted(asked)
    texts, counts = found.texts, found.counts
    assert texts == drafted(asked).texts
    assert sum(found.verified) > 0
    assert found.emitted == []
    assert counts["draft_tokens"] > 0
    assert 0 <= (acceptance(counts) or 0) <= 1
    assert (texts == plain(asked).texts) or temperature > 0
    assert (texts[0] == texts[1]) == (temperature == 0)


def test_all_rows_verify_all_drafts_if_they_are_asked_to() -> None:
    """Each of them is counted by its tokens, and the next question is answered as before."""
    head = {"method": "eagle3", "model": str(EMBEDDED_MODEL.parent / "embedded-eagle"), "num_speculative_tokens": 3}
    _, drafted = way(settings_of(speculative_config=head), 1, None)
    asked = Asked([list(range(20, 60))], 40, [], 0.0)
    found, always = drafted(asked), drafted(asked._replace(always=True))
    assert always.texts == found.texts
    assert set(always.emitted) <= {1, 2, 3, 4}
    assert 30 < sum(always.emitted) < 40
    assert always.counts["draft_tokens"] >= 3 * len(always.emitted)
    first, *others = by_position(always.emitted, 3)
    assert first == sum(count > 1 for count in always.emitted) / len(always.emitted)
    assert sorted(others, reverse=True) == others
    assert drafted(asked).emitted == by_position([], 3) == []


def test_a_random_head_has_the_numbers_of_another_in_other_places(tmp_path: Path) -> None:
    head = EMBEDDED_MODEL.parent / "embedded-eagle"
    mixed = shuffled(head, tmp_path / "random")
    before, after = (load_file(each / "model.safetensors") for each in (head, mixed))
    assert (mixed / "config.json").read_text() == (head / "config.json").read_text()
    for name, tensor in before.items():
        assert torch.equal(after[name].flatten().sort().values, tensor.flatten().sort().values)
    assert not torch.equal(after["fc.weight"], before["fc.weight"])


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


def test_the_page_shows_the_stored_drafts_by_position() -> None:
    root = Path(__file__).parents[2]
    stored = (root / "benchmarks" / "results" / "dflash-cpu.jsonl").read_text().splitlines()
    assert page([json.loads(line) for line in stored]) in (root / "docs" / "speculation.md").read_text()
