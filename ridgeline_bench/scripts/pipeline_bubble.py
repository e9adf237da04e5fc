"""The bubble of a pipeline: the share of their time that stages work, beside the formula.

    python -m ridgeline_bench.scripts.pipeline_bubble [--training] [--stages 2 4] [--milliseconds 30]
        [--out benchmarks/results/pipeline.jsonl]

Engine, leader, ranks and messages are the real ones, on the CPU over gloo. Only the layers are tiny, and every stage
sleeps beside them for a known time per part of a step, so that the figures say nothing of any device's speed. Of every
part each stage notes when it began (with its input there) and when it ended.

    alone   one prompt is one step of m parts, and nothing else runs: m / (m + p - 1)
    full    rows that decode, in m parts: the next step's first part follows as soon as its tokens are there: m / p, at
            most 1

With --training the stages are those of `ridgeline.training.pipeline`. Each sleeps beside a forward pass as above, and
twice as long beside a backward pass. A batch of m parts is m / (m + p - 1) in both orders:

    gpipe   all forward passes, then all backward passes
    1f1b    one forward and one backward pass in turn

Beside the share stand, for the first stage, the most parts that wait for their backward pass at once, and the bytes
of the activations that autograd keeps for them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from ridgeline.assembly import assemble
from ridgeline.assembly.rank import assemble_rank
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.engine import Engine
from ridgeline.ranks import leader, member
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.parts import Dealer
from ridgeline.ranks.rank import Progress, run
from ridgeline.training.pipeline import SCHEDULES
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.step import DeviceStep
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.training_stages import CHUNK, CONFIG, Share, Work, busy, trained

NOTES = "RIDGELINE_BUBBLE_NOTES"  # the folder for what ranks note
SECONDS = "RIDGELINE_BUBBLE_SECONDS"  # that a stage works on a part
DECODED = 24  # tokens of a row that decodes


# ---- a rank ---------------------------------------------------------------------------------------------------------


def assemble_slow(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    """Assemble a rank whose parts each take a known time, and are noted."""
    worker, ready = assemble_rank(begin, progress)
    segments, seconds = worker.runner.segments, float(os.environ[SECONDS])
    notes = (Path(os.environ[NOTES]) / str(begin.rank)).open("w", buffering=1)
    forward = segments.forward

    def slow(step: DeviceStep) -> None:
        began = time.monotonic()
        forward(step)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        notes.write(f"{began} {time.monotonic()}\n")

    segments.forward = slow  # type: ignore[method-assign]
    return worker, ready


# ---- the engine -----------------------------------------------------------------------------------------------------


class Bench:
    """An engine over so many stages, and what they noted."""

    def __init__(self, engine: Engine, stages: int, notes: Path) -> None:
        self.engine, self.stages, self._notes = engine, stages, notes
        self._asked = 0

    def alone(self, parts: int) -> Share:
        """Run one prompt as one step of so many parts."""
        self._deal(parts)
        work = self._run([(CHUNK * parts, 1)])
        return self._share("alone", parts, parts / (parts + self.stages - 1), work, work[0].begin, work[-1].end)

    def full(self, parts: int) -> Share:
        """Decode with as many rows as parts. Steps at the beginning and the end, where not all rows run, do not
        count."""
        self._deal(parts)
        work = self._run([(1, DECODED)] * parts)
        begin, end = work[len(work) // 4].begin, work[-len(work) // 4].begin
        return self._share("full", parts, min(1.0, parts / self.stages), work, begin, end)

    def _share(self, case: str, parts: int, formula: float, work: Sequence[Work], begin: float, end: float) -> Share:
        return Share(case, self.stages, parts, formula, busy(work, self.stages, begin, end))

    def _deal(self, parts: int) -> None:
        self.engine._worker._dealer.most = parts  # type: ignore[attr-defined]

    def _run(self, asked: Sequence[tuple[int, int]]) -> list[Work]:
        """Run requests of so many prompt and output tokens; return what the stages did, by time."""
        seen = [len(self._read(stage)) for stage in range(self.stages)]
        for prompt, output in asked:
            self._asked += 1
            self.engine.add(_request(self._asked, prompt, output))
        while self.engine.has_work:
            self.engine.step()
        new = [work for stage, count in enumerate(seen) for work in self._read(stage)[count:]]
        return sorted(new, key=lambda work: work.begin)

    def _read(self, stage: int) -> list[Work]:
        lines = (self._notes / str(stage)).read_text().splitlines()
        return [Work(stage, *map(float, line.split())) for line in lines]


def _request(number: int, prompt: int, output: int) -> Request:
    return Request(
        id=str(number),
        prompt_token_ids=(number % 64,) * prompt,
        params=SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        seed=0,
        max_total_tokens=prompt + output,
        cache_salt=str(number),
    )


@contextmanager
def bench(stages: int, seconds: float) -> Iterator[Bench]:
    """An engine over so many stages that each take so long for a part."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": stages}))
        settings = {"dtype": "float32", "device": "cpu", "load_format": "dummy", "pipeline_parallel_size": stages}
        config = LLMConfig(model=place, max_num_batched_tokens=1024, kv_cache_memory=1 << 24, **settings)
        with (
            patch.object(member, "MODULE", "ridgeline_bench.scripts.pipeline_bubble"),
            patch.object(leader, "Dealer", partial(Dealer, least_piece=1)),
            patch.dict(os.environ, {NOTES: folder, SECONDS: str(seconds)}),
        ):
            engine = assemble(config).engine
            try:
                yield Bench(engine, stages, place)
            finally:
                engine.shutdown()


# ---- the table ------------------------------------------------------------------------------------------------------


def served(stages: int, seconds: float) -> list[Share]:
    """Return the shares of so many stages that each take so long for a part."""
    with bench(stages, seconds) as made:
        made.full(1)  # so that all is loaded
        alone = [made.alone(parts) for parts in (1, stages, 2 * stages, 4 * stages)]
        return alone + [made.full(parts) for parts in (1, stages, stages + 1)]


def main() -> None:
    a = asked(
        __doc__,
        stages=[2, 4],
        milliseconds=(30.0, "that a stage takes for a part"),
        training=(False, "measure stages that train"),
        out=Path,
    )
    shares = list[Share]()
    for stages in a.stages:
        cases = [(schedule, parts) for schedule in SCHEDULES for parts in (stages, 2 * stages, 4 * stages)]
        seconds = a.milliseconds / 1000
        shares += trained(stages, cases, seconds) if a.training else served(stages, seconds)
    shown = Share._fields if a.training else Share._fields[:5]
    table = Table(*shown, title="share of their time that stages work")
    for share in shares:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in share[: len(shown)]))
    Console().print(table)
    for share in shares:
        keep(a.out, {"milliseconds": a.milliseconds, **dict(zip(shown, share, strict=False))})


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():  # a rank, as `ridgeline.rank_process` is one
        run(int(sys.argv[1]), assemble_slow)
        os._exit(0)
    main()
