"""One rank of a model that several processes divide between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.core.config import LLMConfig
from ridgeline.defaults import device_of_rank
from ridgeline.kernels.launch import on_device
from ridgeline.parallel.lines import connect
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.process_ring import ProcessRing
from ridgeline.parallel.processes import ProcessAxis, grid, join
from ridgeline.parallel.stamps import stamps_of
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import device_name


def assemble_rank(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    """Return a rank's worker, and what the leader must know of it. Raise InvalidConfig or ModelLoadError."""
    config = LLMConfig(**begin.options)
    device = device_of_rank(config, begin.rank)
    with on_device(device):
        stamps = stamps_of(device) if config.rank_trace_dir is not None else None
        everybody = join(begin.rank, begin.size, Path(begin.meeting), device, begin.limit)
        choices = choose(config, device, mesh_of(config, everybody, begin.limit).watched(stamps))
        worker, memory = device_worker(choices, progress)
    return worker, Ready(
        dtype=choices.dtype,
        why=choices.why,
        device_name=device_name(device),
        weights=memory.weights,
        activations=memory.activations,
        kv_cache=memory.kv_cache,
        num_pages=memory.layout.num_pages,
        block_size=memory.layout.block_size,
        max_model_len=memory.max_model_len,
        max_seqs=choices.max_seqs,
        max_tokens=choices.max_tokens,
        cascade=choices.cascade,
        captured=choices.captured,
    )


def mesh_of(config: LLMConfig, everybody: ProcessAxis, limit: float) -> Mesh:
    """Return this process's axes. Every process calls it at the same time.

    Processes that divide matrices have consecutive numbers; so a stage's ranks, and those with the same share of a
    context, follow each other. limit: seconds after which a message or a collective is given up.
    """
    mesh, inner = Mesh(whole_experts=config.enable_expert_parallel), config.tensor_parallel_size
    if inner == everybody.size:
        return replace(mesh, tp=everybody)
    rows, columns = grid(everybody.size, inner)
    if inner > 1:
        mesh = replace(mesh, tp=everybody.divided(ProcessAxis, rows, limit))
    if config.pipeline_parallel_size > 1:
        return replace(mesh, pp=connect(everybody, columns, limit), layers=config.pipeline_layer_partition)
    return replace(mesh, cp=everybody.divided(ProcessRing, columns, limit))
