"""Other projects' kernels for the arguments of our ops, as sweeps time them beside ours: vLLM's, FlashInfer's
(flashinfer_peers.py), ThunderKittens' (thunderkittens.py), DeepSeek's (deepseek_peers.py), and those of
flash-linear-attention, from its own package or as vLLM has them.

vLLM's kernels of prompts do not gather rows' states nor put them back, and what flash-linear-attention takes as ready,
decays and strengths, is not in its time, so they have a little less to do. Outputs are compared, states are not. One of
the two orders of states in which flash-linear-attention is tried is wrong, and says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.selective_scan.op import ScanInputs
from ridgeline.kernels.scans.ssd.op import SsdInputs
from ridgeline_bench.sweep import deepseek_peers, flashinfer_peers, thunderkittens

VLLM_CHUNK = 256
FLA = {  # package → where it has flash-linear-attention
    "fla": ("fla.ops.gated_delta_rule",),
    "vllm": ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops"),
}


class PeerKernel:
    """A peer with what it makes of the arguments once: inputs in its own order, chunks, places of states.

    `prepare` takes the op's arguments, and returns a call without arguments. Arguments are known again by their first.
    """

    def __init__(self, prepare: Callable[..., Callable[[], Any]]) -> None:
        self.prepare = prepare
        self._made: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def forget(self) -> None:
        """Give back what was made of other arguments."""
        self._made.clear()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Raises AssertionError if the peer has no such function, or it fails."""
        try:
            if id(given[0]) not in self._made:
                self._made[id(given[0])] = given[0], self.prepare(*given, **options)
            return self._made[id(given[0])][1]()
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise AssertionError(f"{type(error).__name__}: {error}"[:300]) from error


def _vllm_ssd(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata) -> Callable[[], Tensor]:
    x_THP, dt_TH, rate_H, b_TGS, c_TGS = given.x_THP, given.dt_TH, given.rate_H, given.b_TGS, given.c_TGS
    skip_H, dt_bias_H, limits = given.skip_H, given.dt_bias_H, (given.dt_min, given.dt_max)
    if metadata.tokens_each == 1:
        width, size = states_NHPS.shape[2:]
        dt, skip, bias = (v[..., None].expand(*v.shape, width) for v in (dt_TH, skip_H, dt_bias_H))
        rate = rate_H[:, None, None].expand(-1, width, size)
        return _vllm_step(states_NHPS, x_THP, dt, rate, b_TGS, c_TGS, skip, bias, None, metadata)
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen as chunk_scan
    from vllm.v1.attention.backends.mamba2_attn import compute_varlen_chunk_metadata

    ends, last_R, row_C = compute_varlen_chunk_metadata(metadata.start_R1, VLLM_CHUNK)
    before_RHPS = states_NHPS[metadata.reads_R]

    def call() -> Tensor:
        y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
        chunk_scan(
            x_THP, dt_TH, rate_H, b_TGS, c_TGS, VLLM_CHUNK, cu_seqlens=metadata.start_R1, cu_chunk_seqlens=ends,
            last_chunk_indices=last_R, seq_idx=row_C, out=y_THP, D=skip_H, dt_bias=dt_bias_H,
            initial_states=before_RHPS, dt_softplus=True, dt_limit=limits, state_dtype=torch.float32,
        )  # fmt: skip
        return y_THP

    return call


def _vllm_scan(given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata) -> Callable[[], Tensor]:
    """vLLM's selective scan. Its inputs have channels first. It overwrites the states that it reads, so it gets
    copies."""
    x_TX, dt_TX, rate_XS, b_TS, c_TS = given.x_TX, given.dt_TX, given.rate_XS, given.b_TS, given.c_TS
    skip_X, dt_bias_X, z_TX = given.skip_X, given.dt_bias_X, given.z_TX
    if metadata.tokens_each == 1:
        return _vllm_step(states_NXS, x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, metadata)
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn

    inputs = [v.T.contiguous() for v in (x_TX, dt_TX, b_TS, c_TS, z_TX) if v is not None]
    states_NXS = states_NXS.clone()

    def call() -> Tensor:
        x_XT, dt_XT, b_ST, c_ST, z_XT = inputs
        y_XT: Tensor = selective_scan_fn(
            x_XT, states_NXS, dt_XT, rate_XS, b_ST[None], c_ST[None], skip_X, z_XT, dt_bias_X, True,
            query_start_loc=metadata.start_R1, cache_indices=metadata.reads_R.int(),
            has_initial_state=~metadata.fresh_R,
        )  # fmt: skip
        return y_XT.T

    return call


def _vllm_step(states: Tensor, x: Tensor, *inputs: Any) -> Callable[[], Tensor]:
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    dt, rate, b, c, skip, bias, z, metadata = inputs
    reads, writes = metadata.reads_R.int(), metadata.writes_R.int()

    def call() -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        selective_state_update(
            states, x, dt, rate, b, c, skip, bias, z=z, dt_softplus=True, state_batch_indices=reads,
            dst_state_batch_indices=writes, out=y,
        )  # fmt: skip
        return y

    return call


def _fla_gated_delta(
    sources: Sequence[str], turned: bool, given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata
) -> Callable[[], Tensor]:
    """turned: states lie as [V, K]. What is made anew of the rows' starts while a graph is captured would lie in memory
    that is given back, so all calls share one tensor of them, by whose identity the peer keeps what it makes."""
    steps = metadata.tokens_each == 1
    name = "fused_recurrent_gated_delta_rule" if steps else "chunk_gated_delta_rule"
    peer = _first(sources, name)
    known = inspect.signature(peer).parameters
    in_place = "ssm_state_indices" in known
    states = states_NGKV if steps and in_place else states_NGKV[metadata.reads_R]
    states = states.transpose(-1, -2).contiguous() if turned else states.clone()
    beta_TG = given.b_TG.float().sigmoid() if steps else given.b_TG.sigmoid()
    wanted = {
        "q": given.q_THK.contiguous()[None], "k": given.k_THK.contiguous()[None], "v": given.v_TGV.contiguous()[None],
        "g": given.log_decay_TGJ(torch.float32)[..., 0][None], "beta": beta_TG[None], "scale": given.scale,
        "initial_state": states, "output_final_state": True, "cu_seqlens": metadata.start_R1.long(),
        "ssm_state_indices": metadata.reads_R.int(), "inplace_final_state": not steps, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    call = partial(peer, **{key: value for key, value in wanted.items() if key in known})
    return lambda: call()[0].reshape(given.v_TGV.shape)


def _first(sources: Sequence[str], name: str) -> Callable[..., Any]:
    """Return the function of the first module that has it. Raise ImportError if none has."""
    for source in sources:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(source), name)
            return found
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no {name} in {', '.join(sources)}")


def _found() -> dict[str, dict[str, PeerKernel]]:
    peers: dict[str, dict[str, PeerKernel]] = {}
    if importlib.util.find_spec("vllm"):
        peers |= {"ssd": {"vllm": PeerKernel(_vllm_ssd)}, "selective_scan": {"vllm": PeerKernel(_vllm_scan)}}
    for package, sources in FLA.items():
        if importlib.util.find_spec(package):
            for turned in (False, True):
                peer = PeerKernel(partial(_fla_gated_delta, sources, turned))
                peers.setdefault("gated_delta", {})[package + " [V, K]" * turned] = peer
    if importlib.util.find_spec("flashinfer"):
        for name, prepare in flashinfer_peers.PEERS.items():
            peers.setdefault(name, {})["flashinfer"] = PeerKernel(prepare)
    if thunderkittens.LIBRARY.exists():
        for name, prepare in thunderkittens.PEERS.items():
            peers.setdefault(name, {})["thunderkittens"] = PeerKernel(prepare)
    for name, ways in deepseek_peers.found().items():
        peers.setdefault(name, {}).update({each: PeerKernel(prepare) for each, prepare in ways.items()})
    return peers


PEERS = _found()  # op → its peers by name
