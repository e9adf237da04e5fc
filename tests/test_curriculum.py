"""docs/curriculum.md: every path and every test that it names exists, and every figure stands on the page it links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "curriculum.md"
HEAD = ["subject", "where it lives", "the test that proves it", "the figure"]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)(#[^)]*)?\)")


class Row(NamedTuple):
    subject: str
    where: str
    test: str
    figure: str


def rows() -> Iterator[Row]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    named = False
    for cells in lines:
        named = cells == HEAD or (named and len(cells) == 4)
        if named and cells != HEAD and not set("".join(cells)) <= set("-: "):
            yield Row(*cells)


ROWS = list(rows())


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def plain(text: str) -> str:
    """A text as its reader sees it, on one line."""
    return re.sub(r"\s+", " ", text.replace("*", "").replace("`", ""))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.subject)
def test_paths_and_tests_are_there(row: Row) -> None:
    paths, tests = (re.findall(r"`([^`]+)`", cell) for cell in (row.where, row.test))
    assert paths
    assert tests
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for each in tests:
        file, _, name = each.partition("::")
        assert (ROOT / file).is_file(), file
        assert re.fullmatch(r"tests/.*test_\w+\.py", file)
        assert functions(ROOT / file), file
        assert not name or name in functions(ROOT / file), each


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.subject)
def test_figures_stand_on_the_page_that_is_linked(row: Row) -> None:
    (link,) = LINK.finditer(row.figure)
    page = plain((PAGE.parent / link[2]).read_text())
    words = link[1]
    assert words.lower() in page.lower(), f"{link[2]} does not say {words!r}"
    others = re.findall(r"(?<![\w.,-])\d[\d,.]*\d(?![\w])", LINK.sub("", row.figure))
    assert [number for number in others if number not in page] == []


def test_every_room_of_the_engine_is_there() -> None:
    text = PAGE.read_text()
    rooms = [path for path in (ROOT / "ridgeline").iterdir() if (path / "__init__.py").exists()]
    assert len(rooms) > 15
    assert [room.name for room in rooms if f"`ridgeline/{room.name}/" not in text] == []


def test_there_are_many_subjects_and_each_is_named_once() -> None:
    assert len(ROWS) > 70
    assert len({row.subject for row in ROWS}) == len(ROWS)


def test_each_subject_of_the_life_of_a_request_has_a_row() -> None:
    life = PAGE.read_text().split("## Where they act")[1].split("\n## ")[0]
    moments = [[cell.strip() for cell in line.strip("|").split("|")] for line in life.splitlines() if line[:1] == "|"]
    named = [subject.strip() for _, subjects, why in moments[2:] for subject in subjects.split(";") if why]
    assert len(named) > 25
    assert len(set(named)) == len(named)
    assert set(named) - {row.subject for row in ROWS} == set()
