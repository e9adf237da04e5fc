"""Stages that train, at work: what each did when, what waited in it, and what share of their time they worked."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.parallel.processes import ProcessAxis, join
from ridgeline.training.pipeline import Pipeline, Stages, stage_decoder, stages_of

CHUNK = 16  # tokens of a part of a prompt
LIMIT = 60.0  # seconds that a stage waits for another one
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
T = TypeVar("T")


class Work(NamedTuple):
    """The interval in which a stage worked on a part, on the machine's clock."""

    stage: int
    begin: float
    end: float


class Share(NamedTuple):
    """The share of their time that stages worked.

    case: "alone" or "full", or a schedule of training. parts: of a step or a batch.
    waiting, kept: of training, the parts that wait in the first stage at most, and the bytes of their activations.
    """

    case: str
    stages: int
    parts: int
    formula: float
    measured: float
    waiting: int = 0
    kept: int = 0


def busy(work: Sequence[Work], stages: int, begin: float, end: float) -> float:
    """Return the share of an interval that stages worked."""
    return sum(max(0.0, min(each.end, end) - max(each.begin, begin)) for each in work) / (stages * (end - begin))


class SlowPipeline(Pipeline):
    """A stage that trains and takes a known time for each pass. work: its passes."""

    def __init__(self, decoder: Decoder, stages: Stages, schedule: str, parts: int, seconds: float) -> None:
        super().__init__(decoder, stages, schedule=schedule, parts=parts, rows=parts, chunk=1 << 15, autocast=None)
        self.stage, self.seconds, self.work = stages.ahead.rank, seconds, list[Work]()

    def run(self, tokens_RS1: Tensor, before_TM: Tensor | None) -> Tensor:
        with self._slow(self.seconds):
            return super().run(tokens_RS1, before_TM)

    def derive(self, out: Tensor, gradient_TM: Tensor | None) -> None:
        with self._slow(2 * self.seconds):
            super().derive(out, gradient_TM)

    @contextmanager
    def _slow(self, seconds: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        self.work.append(Work(self.stage, began, time.monotonic()))


class Kept:
    """The bytes that autograd keeps for backward passes, now and at most. Parameters do not count."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._holders = Counter(each.untyped_storage().data_ptr() for each in parameters)
        self.now = self.most = 0

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held())
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._hooks.__exit__(*failure)

    def _pack(self, saved: Tensor) -> Callable[[], Tensor]:
        held, place = (lambda: saved), saved.untyped_storage()
        self._count(place.data_ptr(), place.nbytes(), 1)
        weakref.finalize(held, self._count, place.data_ptr(), place.nbytes(), -1)
        return held

    def _count(self, place: int, size: int, change: int) -> None:
        before = self._holders[place]
        self._holders[place] += change
        self.now += size * (bool(self._holders[place]) - bool(before))
        self.most = max(self.most, self.now)


def on_processes(size: int, work: partial[T]) -> list[T]:
    """Call a function with arguments and, as the last one, the axis of so many processes that gloo joins. Return what
    each returned."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", work.func.__module__])  # imported once; a backward pass needs both
    with TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as pool:
        return list(pool.map(partial(_on_process, work, size, Path(folder) / "meeting"), range(size)))


def _on_process(work: partial[T], size: int, meeting: Path, rank: int) -> T:
    torch.set_num_threads(1)
    return work(join(rank, size, meeting, torch.device("cpu"), LIMIT))


class Batch(NamedTuple):
    """What a stage found of one batch."""

    work: list[Work]
    waiting: int
    kept: int


def train(cases: Sequence[tuple[str, int]], seconds: float, everybody: ProcessAxis) -> list[Batch]:
    """Run a batch of each case, a schedule and so many parts, as one of the stages."""
    stages, spec = stages_of(everybody, LIMIT), model_config({**CONFIG, "num_hidden_layers": everybody.size}).spec
    decoder, found = stage_decoder(spec, stages, 0, torch.device("cpu")), list[Batch]()
    for schedule, parts in cases:
        pipeline = SlowPipeline(decoder, stages, schedule, parts, seconds)
        tokens_BS1 = torch.arange(parts * (CHUNK + 1)).reshape(parts, -1) % CONFIG["vocab_size"]
        everybody.all_reduce(torch.zeros(1))  # all begin together
        with Kept(decoder.parameters()) as kept:
            pipeline.backward(tokens_BS1, lambda loss: loss)
        decoder.zero_grad()
        found.append(Batch(pipeline.work, pipeline.most_waiting, kept.most))
    everybody.all_reduce(torch.zeros(1))  # nobody leaves while messages are under way
    return found


def trained(stages: int, cases: Sequence[tuple[str, int]], seconds: float) -> list[Share]:
    """Return the shares of so many stages that each take so long for a forward pass."""
    shares = []
    of_stage = on_processes(stages, partial(train, [("gpipe", 1), *cases], seconds))  # the first loads everything
    for (schedule, parts), *batches in zip(cases, *(found[1:] for found in of_stage), strict=True):
        work = sorted((each for batch in batches for each in batch.work), key=lambda work: work.begin)
        share = busy(work, stages, work[0].begin, max(each.end for each in work))
        formula = parts / (parts + stages - 1)
        shares.append(Share(schedule, stages, parts, formula, share, batches[0].waiting, batches[0].kept))
    return shares
