"""The common part of the commands: a model and its limits, an engine and a task become records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.specs.model import ModelSpec
from ridgeline.defaults import choose_device
from ridgeline.kernels.base.launch import on_device
from ridgeline.models.config import ModelConfig
from ridgeline.version import __version__
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.hub import is_hub_id
from ridgeline.weights.loader import read_model_config, resolve_model, stored_forms
from ridgeline.worker.machine import device_name, hardware_of
from ridgeline_bench.engines import LoadOptions
from ridgeline_bench.kernels import Timing, dtype_called, subjects, time_kernels
from ridgeline_bench.ladders.runs import RungTime
from ridgeline_bench.ladders.runs import ladder as rungs_of
from ridgeline_bench.limits import hardware_named, with_limits
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.results import Record, host_with
from ridgeline_bench.runner import Job, Outcome, Where, check, run
from ridgeline_bench.workloads import Size, Workload, decoded, uniform, workloads

if TYPE_CHECKING:
    from ridgeline_bench.ladders.micro import MicroAnswer

LONGEST = 32_768  # context enough for every workload, without a KV cache for the longest that a model could do
KERNEL_EFFORT = {"cuda": Effort(seconds=0.1, repeats=15), "cpu": Effort(seconds=0.05, repeats=11)}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The engine to compare with ("none": no engine), and where its process finds it."""

    name: str
    path: Path | None = None
    python: str = ""
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """A model and how to load it; every method runs engines on it and returns figures with their limits."""

    model: str = ""
    dtype: str = "auto"
    device: str = "auto"
    dummy: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int = 0
    scale: float = 1.0
    timeout: float = 3600.0
    commit: str = ""

    @cached_property
    def folder(self) -> Path:
        return resolve_model(self.model or EMBEDDED_MODEL)

    @cached_property
    def config(self) -> ModelConfig:
        return read_model_config(self.folder)

    @property
    def size(self) -> Size:
        return Size(scale=self.scale, vocab_size=self.config.spec.vocab_size)

    def throughput(self, engine: str, shape: Mapping[str, int]) -> Outcome:
        outcome = self._run(self._job(engine, throughput=shape))
        return self._limited(outcome, [uniform(size=self.size, **shape)])

    def latency(self, engine: str, shape: Mapping[str, int]) -> Outcome:
        return self._run(self._job(engine, latency=shape))

    def startup(self, engine: str, repeats: int) -> Outcome:
        """Measure the start. Each repeat is a process of its own, and a figure is the median of all."""
        outcomes = [self._run(self._job(engine)) for _ in range(repeats)]
        notes = [note for outcome in outcomes for note in outcome.notes]
        merged = Outcome(notes=notes, failed=any(outcome.failed for outcome in outcomes))
        for metric in dict.fromkeys(r.metric for outcome in outcomes for r in outcome.records):
            found = [r for outcome in outcomes for r in outcome.records if r.metric == metric]
            samples = tuple(sorted(r.value for r in found))
            if found:
                merged.records.append(replace(found[0], value=samples[len(samples) // 2], samples=samples))
        return merged

    def compare(self, names: tuple[str, ...], peer: Peer) -> Iterator[Outcome]:
        """Run us, then the peer, on the same workloads. Raise InvalidConfig, before anything runs, if a name is unknown
        or the peer cannot be imported."""
        list(workloads(names, Size(scale=self.scale)))
        made: list[Workload] = []
        for outcome in self._beside(peer, {"workloads": names}, {"workloads": names}):
            made = made or list(workloads(names, self.size))
            yield self._limited(outcome, made)

    def traces(self, peer: Peer, shape: Mapping[str, int], folder: Path) -> Iterator[Outcome]:
        """Run us, then the peer, on requests of one length, and write traces (`profile.beside`) into the folders `own`
        and `peer` of `folder`. Raise InvalidConfig, before anything runs, if the peer cannot be imported."""
        own, other = ({"trace": {"shape": shape, "folder": str(folder.resolve() / side)}} for side in ("own", "peer"))
        for outcome in self._beside(peer, own, other):
            yield self._limited(outcome, [decoded(size=self.size, **shape)])

    def _beside(self, peer: Peer, own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Outcome]:
        if not is_hub_id(self.model):  # what must be downloaded first can wait
            self.folder.exists()
        where = Where(timeout=self.timeout, path=(peer.path.resolve(),) if peer.path else ())
        where = replace(where, python=peer.python) if peer.python else where
        if peer.name != "none":
            model = peer.model or self.model or str(EMBEDDED_MODEL)
            check(Job(engine=peer.name, model=model, options=LoadOptions(), size=Size()), where)
        yield self._run(self._job("ridgeline", **own))
        if peer.name == "none":
            return
        job = self._job(peer.name, **other)
        # Our settings (--extra) are not the peer's.
        job = replace(job, model=peer.model or job.model, options=replace(job.options, extra=dict(peer.extra)))
        yield self._run(job, where)

    def _job(self, engine: str, **task: Any) -> Job:
        longest = min(self.max_model_len or LONGEST, self.config.spec.max_position_embeddings)
        options = LoadOptions(
            dtype=self.dtype,
            device=self.device,
            dummy=self.dummy,
            max_model_len=longest,
            extra=self.extra,
        )
        return Job(engine=engine, model=str(self.folder), options=options, size=self.size, **task)

    def _run(self, job: Job, where: Where | None = None) -> Outcome:
        name = "embedded" if not self.model else self.folder.resolve().name
        return run(job, where or Where(timeout=self.timeout), model_name=name, commit=self.commit)

    def _limited(self, outcome: Outcome, made: list[Any]) -> Outcome:
        if not outcome.records:
            return outcome
        gpu = outcome.records[0].machine.gpu
        hardware = hardware_named(gpu or device_name(torch.device("cpu")))
        forms = stored_forms(self.folder, self.config, files=not self.dummy)
        return replace(outcome, records=with_limits(outcome.records, made, self._part, hardware, forms))

    @property
    def _part(self) -> ModelSpec:
        """The part of one of our devices, to which limits belong."""
        tp, whole = self.extra.get("tensor_parallel_size", 1), bool(self.extra.get("enable_expert_parallel"))
        sources = self.extra.get("data_parallel_size", 1) if whole else 1
        return part_of(self.config.spec, tp, whole_experts=whole, sources=sources)


def kernels(*, op: str, dtype: str, device: str, real: bool | None, commit: str) -> tuple[list[Timing], list[Record]]:
    """Return the timings of every implementation of the ops whose name contains `op`, on `device`.

    Raise InvalidConfig if there is none.
    """
    where = choose_device(device)
    on_gpu = where.type == "cuda"
    name = dtype or ("bfloat16" if on_gpu else "float32")
    bench = Bench.of(where, KERNEL_EFFORT[where.type])
    known = subjects(real=on_gpu if real is None else real)
    with on_device(where):
        timings = list(time_kernels(known, dtype_called(name), bench, only=op))
    if not timings:
        raise InvalidConfig(f"no op's name contains {op!r}; see ridgeline/kernels for their names.")
    base, hardware = _kernel_base(where, name, commit), hardware_of(where)
    return timings, [t.record(base, dtype_called(name).itemsize, hardware) for t in timings]


def ladder(
    name: str, device: str, commit: str, cubins: Path | None = None, only: str = ""
) -> Iterator[tuple[RungTime, Record | None]]:
    """Yield the times of a ladder's rungs on `device` (on a CPU: the least ones), those that were measured as results
    too.

    cubins: a folder with the rungs' machine code; without one they are compiled. only: a part of rungs' names.
    """
    where = choose_device(device)
    base = _kernel_base(where, "bfloat16", commit)
    with on_device(where):
        for each in rungs_of(name, where, Bench.of(where, KERNEL_EFFORT[where.type]), cubins, only):
            yield each, each.record(base) if each.seconds else None


def micros(
    device: str, commit: str, cubins: Path | None = None, only: str = ""
) -> Iterator[tuple[MicroAnswer, Record | None]]:
    """Yield the answers of micros on `device` (on a CPU: as they are predicted), those that were measured as results
    too.

    cubins: a folder with machine code; without one it is compiled. only: a part of micros' names, or several. Raises
    InvalidConfig where the package is installed without its micros.
    """
    if find_spec("ridgeline.kernels.micro") is None:
        raise InvalidConfig("micros are not in the wheel; clone the repository and install it with pip install -e .")
    asking = import_module("ridgeline_bench.ladders.micro")  # it imports what is not in the wheel
    where = choose_device(device)
    base = _kernel_base(where, "", commit)
    with on_device(where):
        for each in asking.answers(where, cubins, only):
            yield each, each.record(base) if each.samples else None


def _kernel_base(device: torch.device, dtype: str, commit: str) -> Record:
    return Record(
        engine="ridgeline",
        version=__version__,
        dtype=dtype,
        machine=host_with(device, commit),
        workload="",
        metric="",
        value=0,
        unit="µs",
    )
