"""Micros on a GPU: what was predicted, what was measured, and the verdict. Stored answers as the tables of their page.

ridgeline bench kernels --ladder micro --out FILE.jsonl    # ask, and store
python -m ridgeline_bench.ladders.micro [FILE.jsonl …]     # the tables of docs/kernels/micro.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.cuda.compile import CudaError, NoCudaCompiler
from ridgeline.kernels.cuda.driver import DriverError
from ridgeline.kernels.gemm.ladder.hip import clang
from ridgeline.kernels.micro.hosted import samples
from ridgeline.kernels.micro.machine_code import compiled
from ridgeline.kernels.micro.questions import Micro, MicroCase, micros
from ridgeline.kernels.micro.run import WrongAnswer
from ridgeline_bench.ladders.reasons import MICRO_REASONS
from ridgeline_bench.results import Record, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = (RESULTS / "h200-micro.jsonl", RESULTS / "micro-compiled.jsonl")
WIDTH = 100  # of lines of the page
FAILURES = WrongAnswer, DriverError, CudaError, NoCudaCompiler, torch.OutOfMemoryError  # of one case, and not of others
LONGEST = 300  # characters of what a compiler says


@dataclass(frozen=True)
class MicroAnswer:
    """A case and what was measured, in its unit. No samples: it was not asked, or `error` says why it has none."""

    micro: Micro
    case: MicroCase
    samples: tuple[float, ...] = ()
    error: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def verdict(self) -> str:
        """The error, or the case's verdict on its prediction ("": not asked)."""
        return self.error or (self.case.verdict(self.value) if self.samples else "")

    def record(self, base: Record) -> Record:
        """Return the answer as a result, with the prediction that the file had."""
        options = {"predicted": self.case.predicted, "verdict": self.verdict}
        return Record(
            engine=base.engine, version=base.version, machine=base.machine, date=base.date,
            workload=f"micro:{self.micro.name}", metric=self.case.name, value=self.value, unit=self.case.unit,
            better="lower" if self.case.unit in ("cycles", "µs") else "higher",
            samples=self.samples, options=options,
        )  # fmt: skip


def answers(device: torch.device, cubins: Path | None = None, only: str = "") -> Iterator[MicroAnswer]:
    """Yield all cases of micros whose name contains a word of `only`: asked on a GPU, or a compiler where a clang for
    AMD's GPUs is here, or else as they were predicted.

    cubins: a folder with machine code. Raises InvalidConfig if no name contains `only`.
    """
    chosen = [micro for micro in micros() if any(part in micro.name for part in only.split(","))]
    if not chosen:
        raise InvalidConfig(
            f"no micro's name contains {only!r}; there are {', '.join(each.name for each in micros())}."
        )
    for micro in chosen:
        for case in micro.cases:
            try:
                yield MicroAnswer(micro, case, tuple(_samples(micro, case, device, cubins)))
            except FAILURES as error:
                yield MicroAnswer(micro, case, error=" ".join(str(error).split())[:LONGEST])


def _samples(micro: Micro, case: MicroCase, device: torch.device, cubins: Path | None) -> list[float]:
    if micro.compiled:
        return compiled(micro, case) if clang() else []
    return samples(micro, case, cubins) if device.type == "cuda" else []


def tables(files: Sequence[Path] = FILES) -> str:
    """Return a section for each micro as Markdown: the question, the hypothesis, cases with the newest stored answers,
    and what follows."""
    newest = {(each.workload, each.metric): each for each in read(each for each in files if each.exists())}
    lines = []
    for micro in micros():
        lines += [f"### {micro.name}", "", f"`{micro.source.name}`", "", *wrap(micro.question, WIDTH), ""]
        lines += [*wrap(f"*Hypothesis:* {micro.hypothesis}", WIDTH), ""]
        lines += ["| case | predicted | measured | unit | verdict | published |", "|---|---:|---:|---|---|---|"]
        for case in micro.cases:
            found = newest.get((f"micro:{micro.name}", case.name))
            measured = (f"{found.value:.4g}", str(found.options["verdict"])) if found else ("", "")
            cells = case.name, f"{case.predicted:g}", measured[0], case.unit, measured[1], case.published
            lines.append(f"| {' | '.join(cells)} |")
        why = MICRO_REASONS.get(micro.name)
        lines += ["", *([*wrap(f"*What follows:* {why}", WIDTH), ""] if why else [])]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables([*map(Path, sys.argv[1:])] or FILES))
