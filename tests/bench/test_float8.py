"""The page on E4M3 and E5M2 says what torch's own types do, for every one of their 256 bytes."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline_bench.scripts import float8

TYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
each_format = pytest.mark.parametrize("how", float8.BOTH, ids=lambda how: how.name)


@each_format
def test_every_byte_stands_for_what_torch_says(how: float8.Float8) -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(TYPES[how.name]).double()
    ours = torch.tensor([how.value(byte) for byte in range(256)], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit()[~ours.isnan()], theirs.signbit()[~theirs.isnan()])


@each_format
def test_rounding_is_to_the_nearest_and_saturates(how: float8.Float8) -> None:
    """All values, all middles between neighbours, what lies just beside the middles, and what lies beyond."""
    values = torch.tensor(how.finite(), dtype=torch.float64)
    middles = (values[:-1] + values[1:]) / 2
    width = values[1:] - values[:-1]
    x = torch.cat((values, middles, middles + width / 64, middles - width / 64, values[[0, -1]] * 1.5)).float()
    largest = float(values[-1])
    theirs = x.clamp(-largest, largest).to(TYPES[how.name]).float()
    assert torch.equal(how.rounded(x), theirs)
    distance = (x.double()[:, None] - values).abs()
    assert torch.equal((how.rounded(x).double() - x.double()).abs(), distance.min(1).values)
    assert how.rounded(torch.tensor([math.inf, -math.inf])).tolist() == [largest, -largest]
    assert how.rounded(torch.tensor(math.nan)).isnan()


@each_format
def test_the_facts_are_those_of_torchs_types(how: float8.Float8) -> None:
    info = torch.finfo(TYPES[how.name])
    column = 1 + float8.BOTH.index(how)
    said = {row[0]: row[column] for row in float8.facts()}
    assert float(said["largest number"].replace(",", "")) == info.max
    assert said["least normal number"] == f"2^{math.log2(info.tiny):.0f}"
    assert said["numbers between two powers of two"] == str(round(1 / info.eps))
    x = torch.linspace(1, 2, 4097)[1:-1]
    worst = float(((how.rounded(x) - x).abs() / x).max())
    assert said["largest relative error of a normal number"] == f"{worst:.2%}"


def test_the_page_shows_these_tables() -> None:
    page = (float8.PICTURE.parents[1] / "quantization.md").read_text()
    facts, measured = float8.tables()
    assert facts in page, "run: python -m ridgeline_bench.scripts.float8"
    # normal numbers differ between versions of torch in the last digit that is shown, so only the first is compared
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if " dB |" in line}
    for line in measured.splitlines()[2:]:
        name, *now = (cell.strip() for cell in line.strip("|").split("|"))
        then = [cell.strip() for cell in rows[name].strip("|").split("|")][1:]
        assert [float(x.split()[0]) for x in now] == pytest.approx([float(x.split()[0]) for x in then], abs=0.3)
