"""One rank of a model that several processes divide between them."""

from __future__ import annotations

from pathlib import Path

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.core.config import LLMConfig
from ridgeline.defaults import device_of_rank
from ridgeline.kernels.launch import on_device
from ridgeline.parallel.lines import connect
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.processes import ProcessAxis, join
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import device_name


def _mesh(config: LLMConfig, ranks: ProcessAxis, limit: float) -> Mesh:
    whole_experts = config.enable_expert_parallel
    if config.pipeline_parallel_size == 1:
        return Mesh(tp=ranks, whole_experts=whole_experts)
    pipe, tp = connect(ranks, config.pipeline_parallel_size, limit)
    return Mesh(tp=tp, whole_experts=whole_experts, pp=pipe, layers=config.pipeline_layer_partition)


def assemble_rank(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    """Return a rank's worker, and what the leader must know of it. Raise InvalidConfig or ModelLoadError."""
    config = LLMConfig(**begin.options)
    device = device_of_rank(config, begin.rank)
    with on_device(device):
        whole = config.pipeline_parallel_size == 1
        ranks = join(begin.rank, begin.size, Path(begin.meeting), device, begin.limit, adds_up=whole)
        mesh = _mesh(config, ranks, begin.limit)
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
