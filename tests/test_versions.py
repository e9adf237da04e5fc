"""What `make versions` makes of pyproject.toml, and of pytest's report."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from tests import versions

TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
def test_left_out(): pytest.skip("why")

@pytest.fixture
def broken(): raise ValueError
def test_without_its_fixture(broken): pass
"""


def test_both_ends_are_those_that_are_allowed() -> None:
    project = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
    extras = chain(*project["optional-dependencies"].values())
    asked = [Requirement(each) for each in (*project["dependencies"], *extras)]
    ranges = {each.name: each.specifier for each in asked}
    made = list(versions.environments())
    assert {each.oldest for each in made} == {True, False}
    for each in made:
        named = {one.name: one.specifier for one in map(Requirement, each.wanted())}
        assert ranges["torch"].contains(each.torch)
        for name in ("transformers", "triton"):
            [pin] = named[name] or [None]
            assert (pin is not None) == each.oldest
            if pin is not None:
                assert str(ranges[name]) == f">={pin.version}"
    assert all((versions.ROOT / each).exists() for each in versions.ORACLES)


def test_a_report_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_some.py"]
    subprocess.run(run, cwd=tmp_path, capture_output=True, check=False)
    found = versions.outcome(report)
    failures = ["test_some::test_bad", "test_some::test_without_its_fixture"]
    assert found == {"passed": 1, "skipped": 1, "failed": 2, "failures": failures}
