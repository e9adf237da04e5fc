"""The pages tell the truth where a program can tell: links and files are there, and commands have the options named."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ridgeline.cli import app

ROOT = Path(__file__).parents[1]
LOG = sorted((ROOT / "docs" / "log").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + [
    *sorted((ROOT / "docs").glob("*.md")),
    *LOG,
]
HISTORY = ("CHANGELOG.md", "log.md", *(page.name for page in LOG))  # they may name what was there once
PLANS = ("growth.md",)  # and this one what will be
NAMED_FROM = ("", "ridgeline", "ridgeline/serving", "ridgeline/kernels", "ridgeline/bench/quality")
COMMANDS = typer.main.get_command(app)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose_and_code(page: Path) -> tuple[list[str], list[str]]:
    """Return the lines outside fences and those inside."""
    kinds: tuple[list[str], list[str]] = [], []
    fenced = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        else:
            kinds[fenced].append(line)
    return kinds


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives the page's headings."""
    return {anchor_of(line.lstrip("#").strip()) for line in prose_and_code(page)[0] if line.startswith("#")}


def anchor_of(heading: str) -> str:
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every `ridgeline …` that the page shows."""
    prose, code = prose_and_code(page)
    shown = "\n".join(code).replace("\\\n", " ").splitlines()
    shown += re.findall(r"`([^`]+)`", "\n".join(prose))
    for line in shown:
        line = re.sub(r"\s#.*|^\s*\.venv/bin/", "", line).strip()
        if line.startswith("ridgeline "):
            yield shlex.split(line)[1:]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    local = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    local += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in local:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    if page.name in HISTORY + PLANS:
        pytest.skip("speaks of other days")
    named = set(re.findall(r"`([\w/-]+/[\w-]+\.(?:py|sh|md|svg))`", page.read_text()))
    assert [f for f in sorted(named) if not any((ROOT / base / f).exists() for base in (*NAMED_FROM, *rooms()))] == []


def rooms() -> list[Path]:
    """Return folders that a page on one of them leaves out: engine, worker, kernels and the like."""
    return [folder for folder in (ROOT / "ridgeline").iterdir() if folder.is_dir()]


@each_page
def test_prose_is_wrapped(page: Path) -> None:
    free = ("|", "    ", "  <")  # tables, code, HTML
    long = [line for line in prose_and_code(page)[0] if len(line) > 100 and not line.startswith(free)]
    assert [line for line in long if "](http" not in line] == []


@each_page
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    if page.name in HISTORY:
        pytest.skip("speaks of other days")
    for words in commands(page):
        command: Any = COMMANDS
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"ridgeline … {words[0]}"
            command, words = command.commands[words[0]], words[1:]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help"}, words


def test_commands_are_found() -> None:
    found = [words[0] for words in commands(ROOT / "README.md")]
    assert {"generate", "serve", "plan", "bench"} <= set(found)


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "ridgeline").iterdir() if path.is_dir()))
def test_docstrings_begin_with_what_the_thing_does_or_is(room: str) -> None:
    """A fragment such as "Of the row." leaves out its subject."""
    odd = re.compile(r"(Of|What|Whether|Where|Who|How|Which)\b")
    found = []
    for path in sorted((ROOT / "ridgeline" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and odd.match(ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert found == []
