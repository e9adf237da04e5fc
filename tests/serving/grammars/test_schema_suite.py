"""Schemas of the JSON Schema Test Suite: how many are accepted, and that no grammar lets anything invalid through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from ridgeline.transport.messages import Grammar
from ridgeline_bench.scripts.schema_suites import Case, Counts, accepted, examine, run, suite_file

FILE = Path(__file__).parent / "schema_suite" / "draft2020-12.json"


def cases() -> list[Case]:
    files = json.loads(FILE.read_text())
    return [case for name, groups in files.items() for case in suite_file(name, groups)]


def test_no_accepted_schema_admits_anything_invalid() -> None:
    counts = run(cases(), walks=1, seconds=600, check=None)
    assert counts.wrong == []
    numbers = counts.numbers
    # Counts are kept: a schema more that is accepted is progress, one less must have a reason.
    assert (numbers["schemas"], numbers["accepted"], numbers["refused"]) == (381, 316, 65)
    assert (numbers["valid instances taken"], numbers["valid instances not taken"]) == (626, 40)
    assert numbers["invalid instances not taken"] == 401
    assert numbers["walks valid"] == 314


def test_what_must_not_be_is_found() -> None:
    """A grammar that is wider than its schema is told of: by an instance, and by what it writes."""
    counts = Counts()
    case = Case("narrow", {"type": "integer", "maximum": 3}, [(7, False), (2, True)])
    examine(case, Grammar(kind="json", text='{"type": "integer", "minimum": 5}'), 3, counts)
    assert counts.numbers == {
        "invalid instances taken": 1,
        "valid instances not taken": 1,
        "walks invalid": 3,
    }
    assert len(counts.wrong) == 4
    assert accepted(Case("no schema", {"type": "integer", "not": {}}), None, counts) is None
    assert counts.numbers["refused"] == 1
