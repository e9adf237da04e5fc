"""Stored results: each line names its machine, commit and date, and a command of today makes it.

benchmarks/results/commands.toml says which command. It also lists what older lines lack, with the reason.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts.evidence.commands import ROOT, commands, problem
from ridgeline_bench.scripts.evidence.pages import PAGES

FOLDER = ROOT / "benchmarks" / "results"
SUBJECTS = ("workload", "kind", "benchmark", "what")  # fields that name what a line measured, the first that is there
FIELDS = ("machine", "commit", "date")
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """Lines of some files, and the command that makes them, or the reason why there is none any more. awaited: they may
    be stored later, by a queue of jobs."""

    lines: Sequence[str]
    files: Sequence[str] = ("*",)
    command: str = ""
    gone: str = ""
    awaited: bool = False

    def __str__(self) -> str:
        return f"{' | '.join(self.lines)} of {' | '.join(self.files)}"

    def fits(self, file: str, subject: str) -> bool:
        return any(fnmatchcase(file, each) for each in self.files) and any(fnmatchcase(subject, e) for e in self.lines)


@dataclass(frozen=True)
class Registry:
    """The content of commands.toml. lacks: by file, the fields that some of its lines lack, and why."""

    made: Sequence[Made]
    lacks: Mapping[str, tuple[Sequence[str], str]]

    @classmethod
    def of(cls, folder: Path = FOLDER) -> Registry:
        found = tomllib.loads((folder / "commands.toml").read_text(encoding="utf-8"))
        return cls([Made(**entry) for entry in found["made"]], found.get("lacks", {}))


def subject(line: Line) -> str:
    """Return what a line measured, or "-" if it does not say so."""
    return next((str(line[name]) for name in SUBJECTS if line.get(name)), "-")


def lacking(line: Line) -> set[str]:
    """Return which of machine, commit and date a line does not name. A calibration is a machine's own description."""
    machine = line if line.get("kind") == "calibration" else line.get("machine") or {}
    there = {
        "machine": machine.get("gpu") or machine.get("cpu") or machine.get("device") or line.get("gpu"),
        "commit": machine.get("commit"),
        "date": line.get("date"),
    }
    return {name for name in FIELDS if not there[name]}


def lines_of(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def problems(folder: Path = FOLDER) -> Iterator[str]:
    """Yield what is wrong with the stored results, in one sentence each."""
    named = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    registry, used, seen = Registry.of(folder), set[int](), dict[str, set[str]]()
    for file in sorted(folder.glob("*.jsonl")):
        found = lines_of(file)
        seen[file.name] = set().union(*map(lacking, found))
        for each in sorted(set(map(subject, found))):
            number = next((n for n, made in enumerate(registry.made) if made.fits(file.name, each)), None)
            if number is None:
                yield f"{file.name} has lines of {each!r}, and commands.toml names no command that makes them"
            else:
                used.add(number)
        if file.stem not in named:
            yield f"no page names {file.name}"
    yield from _lacks(registry, seen)
    for number, made in enumerate(registry.made):
        if number not in used and not made.awaited:
            yield f"commands.toml has an entry that no line fits: {made}"
        yield from _command(made)


def _lacks(registry: Registry, seen: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the difference between what lines lack and what is listed with a reason."""
    for file, found in seen.items():
        listed, reason = registry.lacks.get(file, ((), "-"))
        if missing := found - set(listed):
            yield f"{file} has lines without {', '.join(sorted(missing))}; store them, or list the reason"
        if spare := set(listed) - found:
            yield f"every line of {file} has its {', '.join(sorted(spare))}; take it from the list of what lines lack"
        if not reason:
            yield f"{file} is listed among the files that lack something, without a reason"
    yield from (f"there is no {file} to lack anything" for file in registry.lacks.keys() - seen.keys())


def _command(made: Made) -> Iterator[str]:
    if made.gone:
        return
    if made.command.startswith("make "):
        if f"\n{made.command.split()[1]}:" not in (ROOT / "Makefile").read_text():
            yield f"`{made.command}` makes {made}, and make has no such target"
        return
    found = list(commands(made.command))
    if not found:
        yield f"`{made.command}` makes {made}, and is no command of ours"
    for command in found:
        if told := problem(command, whole=True):
            yield f"`{made.command}` makes {made}: {' '.join(told.split())}"
