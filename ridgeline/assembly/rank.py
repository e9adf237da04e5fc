"""One rank of a model that several processes divide between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.core.config import LLMConfig
from ridgeline.defaults import device_of_rank
from ridgeline.kernels.launch import on_device
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.process_ring import grid
from ridgeline.parallel.processes import join
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import device_name


def assemble_rank(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    """Return a rank's worker, and what the leader must know of it. Raise InvalidConfig or ModelLoadError."""
    config = LLMConfig(**begin.options)
    device = device_of_rank(config, begin.rank)
    with on_device(device):
        ranks = join(begin.rank, begin.size, Path(begin.meeting), device, begin.limit)
        mesh = Mesh(tp=ranks, whole_experts=config.enable_expert_parallel)
        if config.prefill_context_parallel_size > 1:
            tp, cp = grid(ranks, config.tensor_parallel_size)
            mesh = replace(mesh, tp=tp, cp=cp)
        choices = choose(config, device, mesh)
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
