"""One rank of a model that several processes divide between them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.draft import folders_read
from ridgeline.assembly.placement import placement_of
from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.defaults import check_max_model_len, choose_limits, device_of_rank
from ridgeline.kernels.base.launch import on_device
from ridgeline.parallel.exchange import Exchange, SwapExchange
from ridgeline.parallel.lines import connect
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.process_ring import ProcessRing
from ridgeline.parallel.processes import ProcessAxis, grid, join
from ridgeline.parallel.stamps import stamps_of
from ridgeline.parallel.step_trace import TracedStamps
from ridgeline.ranks.messages import Begin, Ready
from ridgeline.ranks.rank import Progress
from ridgeline.weights.folder import EMBEDDED_MODEL, fingerprint
from ridgeline.weights.loader import described, resolve_model
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.machine import device_name

logger = logging.getLogger(__name__)


def assemble_rank(begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]:
    """Return a rank's worker, and the facts that the leader needs. Raise InvalidConfig or ModelLoadError."""
    config = LLMConfig(**begin.options)
    device, seen = device_of_rank(config, begin.rank), fingerprint(*folders_read(config))
    with on_device(device):
        stamps = None
        if config.rank_trace_dir is not None:
            trace = Path(config.rank_trace_dir) / f"torch-rank{begin.rank}.json"
            stamps = TracedStamps(stamps_of(device), trace, device)
        adds_up = config.tensor_parallel_size == begin.size
        meeting, through_host = Path(begin.meeting), config.unlike_stages
        everybody = join(
            begin.rank, begin.size, meeting, device, begin.limit, adds_up=adds_up, through_host=through_host
        )
        if through_host and device.type == "cpu":  # ranks on GPUs leave the cores to it
            torch.set_num_threads(max(1, available() // config.stage_kinds.count("cpu")))
        if config.enable_eplb:  # what sending takes is there before memory is counted
            everybody.swap_rows(torch.zeros(begin.size, 1, device=device), [1] * begin.size, [1] * begin.size)
        choices = choose(config, device, mesh_of(config, everybody, device, begin.limit).watched(stamps))
        worker, memory = device_worker(choices, progress)
        if config.enable_eplb:
            worker.runner.mover.check()
        waiting = 0 if choices.below is None else choices.below.num_bytes
        copying = waiting / worker.runner.decoder.bytes_per_second() if waiting else 0.0
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
        fingerprint=seen,
        below_bytes=waiting,
        copying=copying,
    )


def mesh_of(config: LLMConfig, everybody: ProcessAxis, device: torch.device, limit: float) -> Mesh:
    """Return this process's axes. Every process calls it at the same time.

    Processes that divide matrices have consecutive numbers; so a stage's ranks, and those with the same share of a
    context, follow each other. limit: the timeout of a message or a collective, in seconds.
    """
    folder = resolve_model(config.model or EMBEDDED_MODEL, config.revision, config.download_dir)
    spec = described(folder, config).spec
    mesh = Mesh(
        whole_experts=config.enable_expert_parallel,
        placement=placement_of(config, spec),
        shares_pictures=config.mm_encoder_tp_mode == "data",
        movers=everybody if config.enable_eplb else None,
    )
    inner = config.tensor_parallel_size
    if inner == everybody.size:
        return replace(mesh, tp=everybody)
    if config.data_parallel_size > 1:
        return replace(mesh, exchange=_exchange(config, spec, everybody, device))
    rows, columns = grid(everybody.size, inner)
    if inner > 1:
        mesh = replace(mesh, tp=everybody.divided(ProcessAxis, rows, limit))
    if config.pipeline_parallel_size > 1:
        return replace(mesh, pp=connect(everybody, columns, limit), layers=config.pipeline_layer_partition)
    return replace(mesh, cp=everybody.divided(ProcessRing, columns, limit))


def _exchange(config: LLMConfig, spec: ModelSpec, ranks: ProcessAxis, device: torch.device) -> Exchange:
    """Return the way in which tokens reach the ranks of their experts. Raise InvalidConfig."""
    if config.all2all_backend == "distributed" or device.type != "cuda":
        return SwapExchange(ranks)
    from ridgeline.parallel.peer_exchange import PeerExchange  # here, because it needs Triton and a build for GPUs

    mixtures = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    used = max(mixture.routing.top_k for mixture in mixtures)
    width = max(mixture.latent or spec.hidden_size for mixture in mixtures)
    held = max(mixture.routing.experts for mixture in mixtures) // ranks.size
    _, most = choose_limits(config, device, spec.pooling, check_max_model_len(config.max_model_len, spec))
    try:
        return PeerExchange(ranks, device, most=most, width=width, used=used, itemsize=4, held=held)
    except RuntimeError as error:
        if config.all2all_backend == "auto":
            logger.warning("tokens go to their experts over NCCL, since GPUs cannot write to each other (%s)", error)
            return SwapExchange(ranks)
        raise InvalidConfig(
            f"GPUs cannot write to each other ({error}); set all2all_backend to distributed."
        ) from error
