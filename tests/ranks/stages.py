"""The stages of a pipeline as threads of this process, with queues between them: parts of plans, and what becomes of
them, without processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.wiring import Wiring, _engine
from ridgeline.core.config import LLMConfig
from ridgeline.core.expert_load import ExpertLoad
from ridgeline.core.plan import MaskedDrafts, StepPlan, StepResult
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pipe import Wait
from ridgeline.ranks.merging import merged, of_stages
from ridgeline.ranks.parts import Dealer, Part, given_to
from ridgeline.worker.local import LocalWorker
from tests.driving import Rig

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
    """A `core.plan.Worker` of several. dealt: the parts of every plan. settles: as the leader does where nothing
    follows."""

    def __init__(self, workers: list[LocalWorker], least_piece: int) -> None:
        self.workers, self._dealer = workers, Dealer(len(workers), least_piece)
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
            assert len({(result.error is None, result.dropped) for result in row}) == 1, "one stage failed alone"
        if not self._pending:
            for worker in self.workers:
                worker.settle(parts[-1].plan.id)
        return merged(plan, parts, [row[-1] for row in results])

    def expert_load(self) -> ExpertLoad | None:
        return of_stages([worker.expert_load() for worker in self.workers])

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@contextmanager
def staged(folder: Path, stages: int, *, least_piece: int = 2, **settings: Any) -> Iterator[Rig]:
    """`tests.driving.rig` over the stages of a pipeline."""
    options = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 4, "kv_cache_memory": 1 << 19, **settings}
    config = LLMConfig(model=folder, **{"dtype": "float32", "device": "cpu", "debug_checks": True, **options})
    partition = config.pipeline_layer_partition
    workers, made = [], None
    for pipe in pipes(stages):
        choices = choose(config, torch.device("cpu"), Mesh(pp=pipe, layers=partition))
        worker, memory = device_worker(choices, None)
        workers.append(worker)
        made = made or (choices, memory)
        assert memory.layout.num_pages == made[1].layout.num_pages
    assert made is not None
    choices, memory = made
    wiring = Wiring(memory, choices.model.spec.vocab_size, choices.max_seqs, choices.cascade, None, False)
    engine = _engine(config, Stages(workers, least_piece), wiring)
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        yield Rig(engine)
