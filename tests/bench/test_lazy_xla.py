"""What was counted of lazy graphs, and what the page says of it."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from ridgeline_bench.scripts import lazy_xla

ROOT = Path(__file__).parents[2]
LINES = [json.loads(line) for line in (ROOT / "benchmarks/results/cpu-xla.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs/kernels/architectures.md").read_text()


def test_the_page_s_table_is_what_was_counted() -> None:
    *counted, _ = LINES
    section = PAGE.partition("## Lazy graphs, run on a CPU")[2]
    rows = re.findall(r"^\|[^|]+\| (\d+) \| (\d+) \| as found \|$", section, re.MULTILINE)
    assert [(str(line["compiled"]), str(line["ran"])) for line in counted] == rows
    assert all({name: line[name] for name in line["expected"]} == line["expected"] for line in counted)


def test_one_prediction_of_the_mesh_was_wrong_and_the_page_says_so() -> None:
    mesh = LINES[-1]
    wrong = {name for name, value in mesh["expected"].items() if mesh[name] != value}
    assert wrong == {"all-gather"}
    assert "one all-gather that was not" in " ".join(PAGE.split())
    assert mesh["largest_error"] < 1e-4


def test_without_torch_xla_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lazy_xla.metadata, "version", lacking)
    monkeypatch.setattr("sys.argv", ["lazy_xla"])
    with pytest.raises(SystemExit, match=r"install torch~=2\.9\.0 and torch_xla"):
        lazy_xla.main()
