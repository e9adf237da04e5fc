"""Several processes that fine-tune together: they make the steps of one that has all packs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.parallel.processes import ProcessAxis
from ridgeline.training import fine_tune, head_recipe, recipe, reinforce, replicas
from ridgeline.training.fine_tune import FineTuneConfig
from ridgeline.training.replicas import TrainingReplicas
from ridgeline_bench.scripts.training_stages import on_processes

CPU = torch.device("cpu")


def config_of(folder: Path, data: Path, out: Path, **more: Any) -> FineTuneConfig:
    given: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "pack_tokens": 64, "packs": 2, "lr": 2e-2, **more}
    return FineTuneConfig(kind="sft", model=folder, base="tiny", data=data, out=out, device=CPU, **given)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    turns = [({"role": "user", "content": f"a = {i}"}, {"role": "assistant", "content": "print(a)"}) for i in range(24)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return path


class SummingThreads(threading.local):
    """Two threads that stand for processes: a sum over both is that of processes."""

    rank = 0

    def __init__(self, barrier: threading.Barrier, given: dict[int, Tensor]) -> None:
        self.barrier, self.given = barrier, given

    def all_reduce(self, x: Tensor) -> None:
        self.given[self.rank] = x.clone()
        self.barrier.wait(60)
        x.copy_(self.given[0] + self.given[1])
        self.barrier.wait(60)


def same_runs(one: Path, two: Path) -> None:
    """Check that two runs wrote the same bits and the same rows."""
    for file in ("adapter/adapter_model.safetensors", "checkpoint/optimizer.safetensors"):
        whole, parts = (load_file(each / file) for each in (one, two))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
    keys = ("step", "tokens", "loss", "grad_norm", "lr")
    rows = [[json.loads(line) for line in (each / "log.jsonl").read_text().splitlines()] for each in (one, two)]
    assert [[row[key] for key in keys] for row in rows[0]] == [[row[key] for key in keys] for row in rows[1]]


def test_two_make_the_steps_of_one_and_the_first_writes(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sums have two gradients, so they have the same bits."""
    one, two = tmp_path / "one", tmp_path / "two"
    fine_tune.run(config_of(folder, data, one), Console(quiet=True))
    threads = SummingThreads(threading.Barrier(2), {})
    monkeypatch.setattr(replicas.dist, "all_reduce", threads.all_reduce)

    def on_thread(rank: int) -> Any:
        threads.rank = rank
        return fine_tune._run(config_of(folder, data, two), Console(quiet=True), TrainingReplicas(rank, 2))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(on_thread, range(2))
    assert (first["steps"], second) == (4, {})
    same_runs(one, two)


def test_processes_that_find_other_checkpoints_are_refused(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks of two hosts, of which the first process's has the checkpoint."""
    here, there = tmp_path / "here", tmp_path / "there"
    fine_tune.run(config_of(folder, data, here), Console(quiet=True))
    threads = SummingThreads(threading.Barrier(2), {})
    monkeypatch.setattr(replicas.dist, "all_reduce", threads.all_reduce)

    def on_thread(rank: int) -> str:
        threads.rank = rank
        asked = config_of(folder, data, (here, there)[rank])
        with pytest.raises(InvalidConfig) as refused:
            fine_tune._run(asked, Console(quiet=True), TrainingReplicas(rank, 2))
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        told = [*pool.map(on_thread, range(2))]
    assert [f"process {rank} goes on behind step {at}" in told[rank] for rank, at in enumerate((4, 0))] == [True, True]


def in_process(config: FineTuneConfig, everybody: ProcessAxis) -> bool:
    return bool(fine_tune.run(config, Console(quiet=True)))


@pytest.mark.thorough
def test_two_processes_make_the_steps_of_one(folder: Path, data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fine_tune.run(config_of(folder, data, one), Console(quiet=True))
    assert on_processes(2, partial(in_process, config_of(folder, data, two))) == [True, False]
    same_runs(one, two)


def test_gradients_are_sent_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "BUCKET", 100)
    sizes, sent = [8, 8, 40, 3, 20, 5], list[int]()
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda x: (sent.append(x.numel()), x.mul_(2)))
    tensors = [torch.full((n,), float(n)) for n in sizes]
    TrainingReplicas(0, 2).add_up(tensors)
    assert sent == [16, 40, 23, 5]
    assert [float(each.unique()) for each in tensors] == [2.0 * n for n in sizes]


def test_what_processes_cannot_share_is_refused(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def three(device: torch.device) -> Iterator[tuple[TrainingReplicas, torch.device]]:
        yield TrainingReplicas(0, 3), device

    with monkeypatch.context() as patched:
        patched.setattr(fine_tune, "joined", three)
        with pytest.raises(InvalidConfig, match="3 processes; give a multiple of that as --packs, not 2"):
            fine_tune.run(config_of(folder, data, tmp_path / "out"), Console(quiet=True))
    for size in ("two", "0", "²"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(InvalidConfig, match=f"must be a number of processes, got '{size}'"):
            replicas.asked_for()
    monkeypatch.setenv("WORLD_SIZE", "2")
    nothing: Any = None
    for run in (reinforce.run, head_recipe.run, recipe.run):
        with pytest.raises(InvalidConfig, match="by one process; start it without torchrun, not 2"):
            run(*(nothing, Console(quiet=True), nothing)[: len(signature(run).parameters)])
    with pytest.raises(InvalidConfig, match="give --device cuda, not cuda:1"), replicas.joined(torch.device("cuda:1")):
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(InvalidConfig, match="WORLD_SIZE is 2, but there is no LOCAL_RANK"), replicas.joined(CPU):
        pass
