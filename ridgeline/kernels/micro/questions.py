"""Micros as they are written down: a question, a hypothesis, and cases with predicted numbers, on top of each file.

A case's settings are definitions of the file (capitals) and its launch (small letters):

| setting | what | by default |
|---|---|---|
| `grid` | blocks: a number, `all` for one on each multiprocessor, `2x` for two | 1 |
| `block`, `shared` | threads of a block, bytes of its dynamic shared memory | 32, 0 |
| `lines` | the data are a ring of so many lines of 128 bytes, each with the address of the one `step` further | none |
| `n`, `step`, `rounds` | arguments of the kernel; `lines` are `n`, and `step` is then their golden section | 0, 1, 1 |
| `bytes` | of random data, by default those that `check` or `n` need | |
| `flight` | loads of a thread in one turn: `n` becomes a multiple of what all threads load in one | `n` stays |
| `times` | how often the words that are read count in that sum | 1 |
| `arch`, `count` | of HIP: the GPU of AMD that it is compiled for, and what of its machine code counts | |
| `host`, `way` | a function of `hosted.py` asks, and how | the kernel asks |
| `fresh` | 1: each launch begins where no launch was before | 0 |
| `entries`, `percentile` | answers of a launch, and which of them counts | a block each, 50 |
| `check` | what the kernel's sums must be: the `sum` of all words, of `each` block, `strided`, `total` | not compared |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
NEAR = 0.15  # a prediction is right within this share; of things that are counted it is exact
COUNTED = {"instructions", "waves", "mode", "lanes", "registers", "answers", "wrong numbers"}
TITLES = ("case", "predicted", "unit", "settings", "published")
LAUNCH = {
    "grid", "block", "shared", "lines", "n", "step", "rounds", "bytes", "fresh", "entries", "percentile", "check",
    "times", "flight", "host", "way", "arch", "count",
}  # fmt: skip


class BadQuestion(ValueError):
    """A file does not say what it asks. The message names the file and what is missing."""


@dataclass(frozen=True)
class MicroCase:
    """One measurement of a micro, and what it was predicted to be.

    unit: "cycles" of an operation, or operations (bytes, FLOP, lanes) a cycle, "TB/s", "/ns", "µs", or things counted.
    published: others' figures, with the sources that `SOURCES` lists.
    """

    name: str
    predicted: float
    unit: str
    defines: Mapping[str, str] = field(default_factory=dict)
    launch: Mapping[str, str] = field(default_factory=dict)
    published: str = ""

    def number(self, setting: str, default: int) -> int:
        """Return a setting of the launch."""
        return int(self.launch.get(setting, default))

    def verdict(self, measured: float) -> str:
        """Return "as predicted", or by which factor it was not."""
        near = 0 if self.unit in COUNTED else NEAR
        if abs(measured - self.predicted) <= near * self.predicted:
            return "as predicted"
        return f"{measured / self.predicted:.2f} times" if self.predicted else "not none"


@dataclass(frozen=True)
class Micro:
    """A file that asks a question. question, hypothesis: its words."""

    source: Path
    question: str
    hypothesis: str
    cases: Sequence[MicroCase]

    @property
    def compiled(self) -> bool:
        """A compiler answers it, without a GPU."""
        return self.source.suffix == ".hip"

    @property
    def name(self) -> str:
        """The file's name without its number."""
        return re.sub(r"^\d+_", "", self.source.stem)


SOURCES = {
    "rrze": "RRZE-HPC/gpu-benches at 1038c5d0: `gpu-latency`, `gpu-l2-cache`, `gpu-strides`",
    "dewing": "markdewing/AI_kernels at 0d701add: `latency`",
}


def read(source: Path) -> Micro:
    """Return the micro of a file. Raises BadQuestion."""
    head = [line.removeprefix("//").strip() for line in _head(source.read_text())]
    question = " ".join(head[: _at(head, "", source)])
    words = " ".join(line for line in head if not line.startswith("|"))
    if "?" not in question or "Hypothesis: " not in words:
        raise BadQuestion(f"{source.name} must begin with a question, an empty line, and a hypothesis.")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in head if line.startswith("|")]
    if len(rows) < 3 or tuple(rows[0]) != TITLES:
        raise BadQuestion(f"{source.name} needs a table of cases with the columns {', '.join(TITLES)}.")
    hypothesis = " ".join(words.partition("Hypothesis:")[2].split())
    return Micro(source, question, hypothesis, tuple(_case(row, source) for row in rows[2:]))


def micros() -> list[Micro]:
    """Return all micros, in the order of their numbers: CUDA C++ for a GPU of NVIDIA, HIP for a compiler."""
    files = (path for path in FOLDER.rglob("*") if path.suffix in (".cu", ".hip"))
    return [read(path) for path in sorted(files, key=lambda path: path.name)]


def _head(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[: next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))]


def _at(head: Sequence[str], line: str, source: Path) -> int:
    if line not in head:
        raise BadQuestion(f"{source.name} needs an empty line behind its question.")
    return head.index(line)


def _case(row: Sequence[str], source: Path) -> MicroCase:
    if len(row) != len(TITLES):
        raise BadQuestion(f"{source.name} has a case of {len(row)} cells, not {len(TITLES)}: {' | '.join(row)[:80]}.")
    name, predicted, unit, settings, published = row
    pairs = dict(setting.split("=", 1) for setting in settings.split())
    if unknown := {key for key in pairs if key.islower()} - LAUNCH:
        raise BadQuestion(f"{source.name} has settings that there are not: {', '.join(sorted(unknown))}.")
    defines = {key: value for key, value in pairs.items() if not key.islower()}
    launch = {key: value for key, value in pairs.items() if key.islower()}
    return MicroCase(name, float(predicted), unit, defines, launch, published)
