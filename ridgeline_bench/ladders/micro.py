"""Micros on a GPU: what was predicted, what was measured, and the verdict. Stored answers as the tables of their page.

ridgeline bench kernels --ladder micro --out FILE.jsonl    # ask, and store
python -m ridgeline_bench.ladders.micro [FILE.jsonl]       # the tables of docs/kernels/micro.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.cuda.driver import DriverError
from ridgeline.kernels.gemm.ladder.hip import clang
from ridgeline.kernels.micro.hosted import samples
from ridgeline.kernels.micro.machine_code import compiled
from ridgeline.kernels.micro.questions import Case, Micro, micros
from ridgeline.kernels.micro.run import WrongAnswer
from ridgeline_bench.ladders.reasons import MICRO_REASONS
from ridgeline_bench.results import Record, read

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-micro.jsonl"


@dataclass(frozen=True)
class Answer:
    """A case and what was measured, in its unit. No samples: it was not asked, or `error` says why it has none."""

    micro: Micro
    case: Case
    samples: tuple[float, ...] = ()
    error: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def verdict(self) -> str:
        """What became of the prediction."""
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


def answers(device: torch.device, cubins: Path | None = None, only: str = "") -> Iterator[Answer]:
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
                yield Answer(micro, case, tuple(_samples(micro, case, device, cubins)))
            except (WrongAnswer, DriverError) as error:
                yield Answer(micro, case, error=str(error))


def _samples(micro: Micro, case: Case, device: torch.device, cubins: Path | None) -> list[float]:
    if micro.compiled:
        return compiled(micro, case) if clang() else []
    return samples(micro, case, cubins) if device.type == "cuda" else []


def tables(file: Path = FILE) -> str:
    """Return a section for each micro as Markdown: the question, the hypothesis, cases with the newest stored answers,
    and what follows."""
    newest = {(each.workload, each.metric): each for each in read([file])}
    lines = []
    for micro in micros():
        lines += [f"### {micro.question}", "", f"`{micro.source.name}`. *Hypothesis:* {micro.hypothesis}", ""]
        lines += ["| | predicted | measured | verdict | published |", "|---|---:|---:|---|---|"]
        for case in micro.cases:
            found = newest.get((f"micro:{micro.name}", case.name))
            measured = (f"{found.value:.4g} {case.unit}", str(found.options["verdict"])) if found else ("", "")
            lines.append(f"| {case.name} | {case.predicted:g} | {measured[0]} | {measured[1]} | {case.published} |")
        lines += ["", MICRO_REASONS.get(micro.name, ""), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(*map(Path, sys.argv[1:2])))
