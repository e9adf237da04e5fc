"""The ranks of a model as threads of this process, with queues between the stages of a pipeline: parts of plans, and
what becomes of them, without processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.assembly.choices import Choices, choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.wiring import Wiring, _engine
from ridgeline.core.plan.step import MaskedDrafts, StepPlan, StepResult
from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.core.settings.config import LLMConfig
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pipe import Wait
from ridgeline.ranks.merging import merged, of_stages
from ridgeline.ranks.parts import Dealer, Part, given_to
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.memory import MemoryReport
from tests.driving import Rig
from tests.parallel.threads import ThreadAxis, axes, in_threads

LIMIT = 60  # seconds that a stage waits for another


class QueuePipe:
    """A stage's place among queues."""

    def __init__(self, rank: int, size: int, lines: dict[tuple[str, int], Queue[Tensor]]) -> None:
        self.rank, self.size, self._lines = rank, size, lines

    def receive(self, into_TM: Tensor) -> None:
        into_TM.copy_(self._lines["on", self.rank].get(timeout=LIMIT))

    def send(self, x_TM: Tensor) -> None:
        self._lines["on", self.rank + 1].put(x_TM)

    def hear(self, into_R: Tensor) -> Wait:
        return lambda: into_R.copy_(self._lines["back", self.rank].get(timeout=LIMIT))

    def tell(self, token_R: Tensor) -> None:
        for stage in range(self.size - 1):
            self._lines["back", stage].put(token_R)

    def smallest(self, value: int) -> int:
        return value  # all have as much memory


def pipes(size: int) -> list[QueuePipe]:
    lines = {(way, stage): Queue[Tensor]() for way in ("on", "back") for stage in range(size)}
    return [QueuePipe(rank, size, lines) for rank in range(size)]


class Stages:
    """A `core.plan.step.Worker` of several, which settles as the leader does where nothing follows.

    each: so many of them, one behind the other, are one stage. dealt: the parts of every plan.
    """

    def __init__(self, workers: list[LocalWorker], least_piece: int, block_size: int, each: int = 1) -> None:
        self.workers, self._each = workers, each
        self._dealer = Dealer(len(workers) // each, least_piece, block_size=block_size)
        self._pending: deque[tuple[StepPlan, list[Part]]] = deque()
        self.dealt: list[list[Part]] = []

    def submit(self, plan: StepPlan) -> None:
        parts = self._dealer.parts(plan)
        self.dealt.append(parts)
        self._pending.append((plan, parts))
        for part in parts:
            for worker in self.workers:
                worker.submit(part.plan)

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        [parts] = [parts for plan, parts in self._pending if plan.id == plan_id]
        for part in parts:
            for worker in self.workers:
                worker.provide_masks(part.plan.id, given_to(part, masks), drafts)

    def collect(self) -> StepResult:
        plan, parts = self._pending.popleft()
        results = [[worker.collect() for worker in self.workers] for _ in parts]
        for row in results:
            assert len({(result.error is None, result.dropped) for result in row}) == 1, "one rank failed alone"
            first, *others = row[-self._each :]  # of the last stage, whose ranks all draw
            assert all(np.array_equal(other.tokens_RK, first.tokens_RK) for other in others), "ranks drew unlike tokens"
        if len(self.workers) > self._each and not self._pending:
            for worker in self.workers:
                worker.settle(parts[-1].plan.id)
        return merged(plan, parts, [row[-self._each] for row in results])

    def figures(self) -> WorkerFigures:
        return WorkerFigures(experts=of_stages([worker.figures().experts for worker in self.workers[:: self._each]]))

    def shutdown(self) -> None:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(LocalWorker.shutdown, self.workers))


@contextmanager
def staged(folder: Path, stages: int, *, least_piece: int = 2, **settings: Any) -> Iterator[Rig]:
    """`tests.driving.rig` over the stages of a pipeline."""
    options = {"kv_cache_memory": 1 << 19, **settings}
    with meshed(folder, least_piece=least_piece, pipeline_parallel_size=stages, **options) as own:
        yield own


@contextmanager
def meshed(folder: Path, *, least_piece: int = 2, **settings: Any) -> Iterator[Rig]:
    """`tests.driving.rig` over ranks of all axes that the settings name. Chunks of prompts are cut into pieces of
    least_piece tokens and more."""
    options = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 4, **settings}
    config = LLMConfig(model=folder, **{"dtype": "float32", "device": "cpu", "debug_checks": True, **options})
    found = meshes(config)

    def rank(mesh: Mesh) -> tuple[Choices, LocalWorker, MemoryReport]:
        choices = choose(config, torch.device("cpu"), mesh)
        return choices, *device_worker(choices, None)

    def give_up() -> None:
        for mesh in found:
            for axis in (mesh.tp, mesh.cp):
                if isinstance(axis, ThreadAxis):
                    axis.give_up()

    made = in_threads([partial(rank, mesh) for mesh in found], give_up)
    choices, _, memory = made[0]
    assert {own.layout.num_pages for _, _, own in made} == {memory.layout.num_pages}
    each, size = len(made) // config.pipeline_parallel_size, memory.layout.block_size
    worker = Stages([worker for _, worker, _ in made], least_piece, size, each)
    wiring = Wiring(memory, choices.model.spec.vocab_size, choices.max_seqs, choices.cascade, None, False)
    engine = _engine(config, worker, wiring)
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        yield Rig(engine)


def meshes(config: LLMConfig) -> list[Mesh]:
    """Return the mesh of every rank, in the order of `assembly.rank.mesh_of`."""
    inner, outer = config.tensor_parallel_size, config.ranks // config.tensor_parallel_size
    rows, staged = [axes(inner) for _ in range(outer)], config.pipeline_parallel_size > 1
    columns: list[Any] = [pipes(outer) if staged else axes(outer) for _ in range(inner)]
    alone, found = (
        Mesh(whole_experts=config.enable_expert_parallel, layers=config.pipeline_layer_partition),
        list[Mesh](),
    )
    for number in range(config.ranks):
        row, column = divmod(number, inner)
        own = {"tp": rows[row][column]} if inner > 1 else {}
        if outer > 1:
            own["pp" if staged else "cp"] = columns[column][row]
        found.append(replace(alone, **own))
    return found
