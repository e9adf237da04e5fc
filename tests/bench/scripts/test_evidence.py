"""Statements of pages and stored results that are not so are found, each by its kind, and ours are all so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline_bench.scripts.evidence import __main__ as command
from ridgeline_bench.scripts.evidence import pages, pictures, stored
from ridgeline_bench.scripts.evidence.commands import ROOT, Command, commands, problem

MACHINE = {"cpu": "C", "commit": "abc"}
HERE = {"date": "2026-11-27", "machine": MACHINE}


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ridgeline plan a.json --gpu H200  # a comment", ["ridgeline plan a.json --gpu H200"]),
        ("RATES=4 .venv/bin/ridgeline serve M > log 2>&1", ["ridgeline serve M"]),
        ("cd x && python3 -m tests.test_log && ls", ["python -m tests.test_log"]),
        ("python -m ridgeline bench kernels | head", ["ridgeline bench kernels"]),
        ("python -m ridgeline_bench.scripts.walk [--calls]", ["python -m ridgeline_bench.scripts.walk --calls"]),
        ("python -m pytest", []),
        ("ridgelines are fine", []),
    ],
)
def test_commands_are_found_in_a_line(line: str, found: list[str]) -> None:
    assert [str(command) for command in commands(line)] == found


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ridgeline plan MODEL --gpu H200 --tp N", None),
        ("ridgeline serve … -tp 2", None),
        ("ridgeline generate hello --max-token 3", "No such option"),
        ("ridgeline plan MODEL --tp two", "--tp"),
        ("ridgeline benchmark", "no `ridgeline … benchmark`"),
        ("ridgeline crossover", "Missing"),
        ("python -m ridgeline_bench.scripts.walk", None),
        ("python -m ridgeline_bench.scripts.walk --call-s", "unrecognized arguments: --call-s"),
        ("python -m ridgeline_bench.scripts.jobs FILE", "--out"),
        ("python -m ridgeline_bench.scripts.jog", "no module"),
        ("python -m ridgeline_bench.scripts.replica_routing --fast", "takes no arguments"),
        ("python -m ridgeline_bench.scripts.chunk_sizes --chunks many", "invalid int value"),
    ],
)
def test_a_command_is_read_by_its_own_parser(line: str, told: str | None) -> None:
    (command,) = commands(line)
    found = problem(command, whole=True)
    assert found is None if told is None else told in (found or "")


def test_a_sentence_may_leave_out_arguments_and_not_misname_an_option() -> None:
    assert problem(Command("ridgeline", ("explain", "--tp")), whole=False) is None
    assert "--tensors" in (problem(Command("ridgeline", ("explain", "--tensors")), whole=False) or "")


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a](nothing.md)", "the link nothing.md leads nowhere"),
        ("[a](#some-where)", "the link #some-where leads nowhere"),
        ("`ridgeline/engine/gone.py`", "ridgeline/engine/gone.py is not there"),
        ("`benchmarks/results/gone.jsonl`", "benchmarks/results/gone.jsonl is not there"),
        ("`engine.scheduler.Gone`", "engine.scheduler.Gone is no module of ours"),
        ("```\nridgeline plan M --gpus_ 3\n```", "`ridgeline plan M --gpus_ 3`"),
        ("    python -m ridgeline_bench.scripts.walk --far", "--far"),
        ("`make everything`", "make has no target everything"),
        ("A flag `--of-nobody` is named", "no command has the flag --of-nobody"),
    ],
)
def test_each_kind_of_fault_of_a_page_is_found(tmp_path: Path, text: str, told: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{text}\n")
    assert any(told in found for found in pages.problems(page))


def test_a_page_without_faults_has_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Some title\n\n[a](#some-title) `engine/scheduler.py` `ridgeline plan --tp`\n")
    assert list(pages.problems(page)) == []


# ---- stored results -------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that stores lines and a list of commands, and tells what is wrong with them."""

    def told(lines: list[dict[str, Any]], listed: str, file: str = "h200.jsonl") -> list[str]:
        (tmp_path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "commands.toml").write_text(listed)
        return list(stored.problems(tmp_path))

    return told


WALK = '[[made]]\nlines = ["walk*"]\ncommand = "python -m ridgeline_bench.scripts.walk"\n'


def test_lines_with_origin_and_command_are_right(results: Callable[..., list[str]]) -> None:
    assert results([{"workload": "walk 1", **HERE}, {"kind": "walk 2", **HERE}], WALK) == []
    assert results([{"workload": "old", **HERE}], '[[made]]\nlines = ["old"]\ngone = "for a reason"\n') == []


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ({"machine": MACHINE}, "date"),
        ({"date": "2026-11-27"}, "commit, machine"),
        ({"date": "2026-11-27", "machine": {"gpu": "G", "commit": ""}}, "commit"),
        ({"date": "2026-11-27", "machine": {"gpu": "", "cpu": "", "commit": "a"}}, "machine"),
    ],
)
def test_a_line_without_origin_is_found_unless_the_reason_is_listed(
    results: Callable[..., list[str]], line: dict[str, Any], lacks: str
) -> None:
    lines = [{"workload": "walk", **line}, {"workload": "walk", **HERE}]
    (told,) = results(lines, WALK)
    assert told == f"h200.jsonl has lines without {lacks}; store them, or list the reason"
    listed = f'[lacks]\n"h200.jsonl" = [{json.dumps(lacks.split(", "))}, "a reason"]\n'
    assert results(lines, WALK + listed) == []
    (told,) = results([{"workload": "walk", **HERE}], WALK + listed)
    assert told.startswith("every line of h200.jsonl has its")


def test_a_result_whose_command_is_gone_is_found(results: Callable[..., list[str]]) -> None:
    lines = [{"workload": "walk", **HERE}]
    (told,) = results(lines, WALK.replace("scripts.walk", "scripts.gone"))
    assert "there is no module ridgeline_bench.scripts.gone" in told
    (told,) = results(lines, WALK.replace('walk"\n', 'walk --far"\n'))
    assert "--far" in told
    (told,) = results([*lines, {"workload": "other", **HERE}], WALK)
    assert "'other'" in told
    (told,) = results(lines, WALK + WALK.replace("walk*", "never"))
    assert told == "commands.toml has an entry that no line fits: never of *"
    assert results(lines, WALK + WALK.replace("walk*", "never") + "awaited = true\n") == []
    (told,) = results(lines, WALK, "unnamed-anywhere.jsonl")[:1]
    assert told == "no page names unnamed-anywhere.jsonl"


def test_our_results_have_origins_and_commands() -> None:
    assert list(stored.problems()) == []


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*pictures.PICTURES, *pictures.checked_in()}))
def test_a_picture_is_that_of_its_data(name: str) -> None:
    assert pictures.problem(name) is None


def test_a_picture_of_other_data_or_of_none_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "docs/images/long-context.svg"
    changed = tmp_path / name
    changed.parent.mkdir(parents=True)
    shutil.copy(ROOT / name, changed)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    assert pictures.problem(name) is None
    changed.write_text(changed.read_text().replace("circle", "circles", 1))
    assert "draw another picture" in (pictures.problem(name) or "")
    changed.unlink()
    assert "is not there" in (pictures.problem(name) or "")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    assert pictures.problem(name) is None, "without data there is no picture to draw"
    shutil.copy(pages.ROOT / name, changed)
    assert pictures.problem(name) == f"the data of {name} are not stored"
    assert "nothing draws" in (pictures.problem("docs/images/other.svg") or "")


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "said"), [([], None), (["a is not b"], "1 of these is not so"), (["a", "b"], "2 ")])
def test_the_command_ends_with_an_error_if_anything_is_not_so(
    found: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.CHECKS, "results", lambda: iter(found))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.argv", ["evidence", "--only", "results"])
    if said is None:
        command.main()
        assert capsys.readouterr().out == "results: all is so.\n"
        return
    with pytest.raises(SystemExit, match=said):
        command.main()
    assert capsys.readouterr().out.splitlines() == found
