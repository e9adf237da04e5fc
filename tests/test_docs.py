"""The pages are right where a program can check, and plain where one can count.

`ridgeline_bench/scripts/evidence/` has the checks of links, files, modules, commands, flags and targets of make.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from ridgeline_bench.scripts.evidence import pages
from ridgeline_bench.scripts.evidence.commands import ROOT
from ridgeline_bench.scripts.evidence.pages import PAGES, TODAY, is_there, prose_and_code

GROWTH = ROOT / "docs" / "growth.md"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
page_of_today = pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))


def test_counts_of_kept_kernels_are_those_of_the_file() -> None:
    lines = (ROOT / "tests" / "kernels" / "compiled.jsonl").read_text().splitlines()
    kept = Counter((each["kind"] == "triton", each["arch"].rstrip("a")) for each in map(json.loads, lines))
    archs = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
    page = (ROOT / "docs" / "kernels" / "architectures.md").read_text()
    for triton, row in ((True, "Triton and Gluon kernels"), (False, "kernels in CUDA C++ or HIP")):
        counts = " | ".join(str(kept[triton, arch]) for arch in archs)
        assert f"| {row} kept compiled | {counts} |" in page


@every_page
def test_what_a_page_names_is_there(page: Path) -> None:
    assert list(pages.problems(page)) == []


def test_what_scripts_and_queues_show_is_taken() -> None:
    assert list(pages.wrong_commands_of_scripts()) == []


def test_growth_has_in_italics_what_is_not_there_yet() -> None:
    planned = re.findall(r"(?<![\w*])\*([\w<>./-]+/[\w<>.-]*)\*(?![\w*])", GROWTH.read_text())
    assert len(planned) > 3
    assert [path for path in planned if is_there(path)] == []


@every_page
def test_prose_is_wrapped(page: Path) -> None:
    free = ("|", "    ", "  <")  # tables, code, HTML
    long = [line for line in prose_and_code(page)[0] if len(line) > 100 and not line.startswith(free)]
    assert [line for line in long if "](http" not in line] == []


@page_of_today
def test_sentences_have_at_most_40_words(page: Path) -> None:
    """Tables apart. An empty line ends a sentence, and so does a colon."""
    lines = [line or "." for line in prose_and_code(page)[0] if not line.startswith("|")]
    sentences = re.split(r"(?<=[.:;])\s+", " ".join(lines))
    assert [each for each in sentences if len(each.split()) > 40] == []


@page_of_today
def test_pages_speak_of_requests_clients_and_processes_not_of_people(page: Path) -> None:
    people = re.compile(r"\b(nobody|somebody|everybody|anybody|whoever|whom)\b", re.IGNORECASE)
    assert [line for line in prose_and_code(page)[0] if people.search(line)] == []


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "ridgeline").iterdir() if path.is_dir()))
def test_docstrings_begin_with_what_the_thing_does_or_is(room: str) -> None:
    """A fragment such as "Of the row." leaves out its subject, and "Return how many …" is "Return the number of …"."""
    odd = re.compile(r"((Return )?(what|whether|how|where|who)|Of|Which)\b", re.IGNORECASE)
    found = []
    for path in sorted((ROOT / "ridgeline" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and odd.match(ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert found == []
