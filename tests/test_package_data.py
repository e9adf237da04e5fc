"""What a wheel carries: each file that the package reads is named in pyproject.toml, and no pattern is stale."""

from __future__ import annotations

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PATTERNS = [each.replace("**/", "*") for each in SETTINGS["package-data"]["ridgeline"]]
# Packages that are read in a checkout alone, such as rungs, and what lies in them.
LEFT_OUT = [each.removeprefix("ridgeline.").replace(".", "/") for each in SETTINGS["packages"]["find"]["exclude"]]


def files() -> list[str]:
    found = subprocess.run(["git", "ls-files", "ridgeline"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a checkout")
    names = [each.removeprefix("ridgeline/") for each in found.stdout.splitlines() if not each.endswith(".py")]
    return [each for each in names if not any(fnmatch(each, pattern) for pattern in LEFT_OUT)]


def test_each_file_beside_the_code_is_in_the_wheel() -> None:
    assert [each for each in files() if not any(fnmatch(each, pattern) for pattern in PATTERNS)] == []


def test_each_pattern_finds_a_file() -> None:
    assert [pattern for pattern in PATTERNS if not any(fnmatch(each, pattern) for each in files())] == []
