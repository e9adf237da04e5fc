"""Settings of several devices: the division of the model, and the time that they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Named, Settings
from ridgeline.core.settings.together import SIZES

# Seconds that a step may take: no load of a model outlives less, and torch takes no more than some thousand years
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1, 1_000_000_000
SHORTEST_SILENCE = 1.0  # seconds; processes give a sign of life twice a second


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """The division of a model between devices.

    tensor_parallel_size: how many devices divide every matrix between them; each is a process of its own. On a CPU the
        ranks are processes too.
    pipeline_parallel_size: into how many stages the layers are divided. A step's rows pass through the stages in parts,
        so that all of them work at once. Every stage has tensor_parallel_size devices.
    pipeline_layer_partition: how many layers each stage has, as "10,12,10"; by default stages take equally long.
    pipeline_devices: the kind of each stage's device, as "cpu,cuda"; by default all have that of `device`.
    prefill_context_parallel_size: how many devices (or groups of `tensor_parallel_size`) divide the cached tokens, and
        the tokens of long prompts, between them. Each holds the same weights.
    prefill_context_parallel_threshold: the tokens of a step from which on they are divided. The default follows from
        model and device; shorter steps every device runs by itself.
    data_parallel_size: with enable_expert_parallel, how many ranks have requests and a cache of their own, and divide
        the experts alone between them (data-parallel attention).
    mm_encoder_tp_mode: the pictures of a step that each device of tensor_parallel_size sees, which has the whole tower:
        "weights" (vLLM's default, which divides the tower): all of them, and "data": a share, whose vectors the others
        then get. Sounds are not shared, nor pictures that are codes, or that layers of cross
        attention see.
    all2all_backend: how tokens reach the ranks of their experts with data_parallel_size: "distributed" (NCCL or gloo),
        "peer" (GPUs write into each other's memory), or "auto": that where they can.
    distributed_timeout_seconds: how long a step, or one rank's wait for the others, may take before it fails.
    hang_timeout: the seconds without a sign of life after which a process is taken to hang: a rank, and with
        `ridgeline serve` every process of the server. It is ended then, and replaced.
    numa_bind: each process of the engine keeps to the cores of the NUMA node at which its GPU's PCI lanes end, and
        takes memory there first. A machine with one node stays as it is.
    rank_trace_dir: a folder for traces of steps that show which rank waited for which. Ranks then note when they come
        to collectives and leave them, which takes some microseconds each.
    """

    tensor_parallel_size: Annotated[int, AtLeast(1)] = 1
    pipeline_parallel_size: Annotated[int, AtLeast(1)] = 1
    pipeline_layer_partition: Annotated[str | None, Named('text such as "10,12,10"')] = None
    pipeline_devices: Annotated[str | None, Named('text such as "cpu,cuda"')] = None
    prefill_context_parallel_size: Annotated[int, AtLeast(1)] = 1
    prefill_context_parallel_threshold: Annotated[int | None, AtLeast(1)] = None
    data_parallel_size: Annotated[int, AtLeast(1)] = 1
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"
    all2all_backend: Literal["auto", "distributed", "peer"] = "auto"
    distributed_timeout_seconds: float = 120.0
    hang_timeout: float = 10.0
    numa_bind: bool = False
    rank_trace_dir: Annotated[str | None, Named("the name of a folder")] = None

    def check(self) -> None:
        if not SHORTEST_TIMEOUT <= self.distributed_timeout_seconds <= LONGEST_TIMEOUT:
            raise InvalidConfig(
                f"distributed_timeout_seconds must be at least {SHORTEST_TIMEOUT} and at most {LONGEST_TIMEOUT:,}, got "
                f"{self.distributed_timeout_seconds!r}."
            )
        if not SHORTEST_SILENCE <= self.hang_timeout <= LONGEST_TIMEOUT:
            raise InvalidConfig(
                f"hang_timeout must be at least {SHORTEST_SILENCE:g} and at most {LONGEST_TIMEOUT:,}, got "
                f"{self.hang_timeout!r}."
            )

        if self.pipeline_devices is not None:
            self._check_stages(self.pipeline_devices)

    def _check_stages(self, named: str) -> None:
        if unknown := [kind for kind in self.stage_kinds if kind not in ("cpu", "cuda")]:
            raise InvalidConfig(f"pipeline_devices is {named!r}, and {unknown[0]!r} is neither cpu nor cuda.")
        if (count := len(self.stage_kinds)) != self.pipeline_parallel_size:
            raise InvalidConfig(
                f"pipeline_devices is {named!r}, and pipeline_parallel_size is {self.pipeline_parallel_size}; set that "
                f"to {count}."
            )
        if self.unlike_stages and self.pipeline_layer_partition is None:
            raise InvalidConfig(
                f"pipeline_devices is {named!r}: layers are dealt out equally to like devices alone; set "
                "pipeline_layer_partition (`ridgeline plan --host-layers` compares divisions)."
            )

    @property
    def stage_kinds(self) -> tuple[str, ...]:
        """The kind of each stage's device, if stages have devices of their own."""
        return () if self.pipeline_devices is None else tuple(self.pipeline_devices.split(","))

    @property
    def unlike_stages(self) -> bool:
        """True if stages have devices of several kinds."""
        return len(set(self.stage_kinds)) > 1

    @property
    def divided_by(self) -> list[str]:
        """The settings by which several devices divide the model between them."""
        return [name for name in SIZES if getattr(self, name) > 1]

    @property
    def ranks(self) -> int:
        """The processes of one engine, each on a device."""
        return prod(getattr(self, name) for name in SIZES)
