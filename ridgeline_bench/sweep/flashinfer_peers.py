"""FlashInfer's kernels for the arguments of our ops, as sweeps time them beside ours.

    ridgeline bench sweep paged_attention        # or decode_attention, latent_attention, rms_norm, gated_activation, …
    python -m ridgeline_bench.sweep.flashinfer_peers [OP …]   # calls each once, so no sweep waits for a compiler

FlashInfer compiles a kernel when it is first called, with nvcc and ninja. Its plans (which rows are cut into how
many pieces) are made once, as an engine makes them for all layers of a step, so they are not in the times. The
caches are ours: blocks [N, G, P, D] are FlashInfer's layout HND, and are read where they lie.

What a function takes in place of our op's contract:

    decode_attention  three launches: rotation, keys and values into the pages, attention. No norms of heads
    paged_attention   no sinks, no trees, no 8-bit caches; ALiBi by its own slopes, so not by ours
    latent_attention  no trees; latents and rotated parts are two views of our cache
    rms_norm          with a residual it writes to its arguments
    rope              it rotates in place
    sample            the greedy choice, as top-k of 1: FlashInfer has no function for it alone

Legend:
    R  rows
    I  blocks of all rows, one row behind the other
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.op import LatentLevels
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.ops import OPS
from ridgeline.kernels.small.rotary.op import Projected, split_heads

WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends
Call = Callable[[], Any]


class Pages(NamedTuple):
    """A batch's block table as FlashInfer takes it, int32.

    indptr_R1: where each row's blocks begin in `indices_I`, then how many there are.
    last_R: the tokens in a row's last block, 1 to P.
    """

    indptr_R1: Tensor
    indices_I: Tensor
    last_R: Tensor


def pages(batch: RaggedBatch, block_size: int) -> Pages:
    """Return the blocks that rows use, in order. Raise ValueError for a row without tokens in the cache."""
    length_R = batch.kv_len_R.long()
    if not bool((length_R > 0).all()):
        raise ValueError("FlashInfer takes no rows without tokens.")
    count_R = (length_R + block_size - 1) // block_size
    indptr_R1 = torch.cat((count_R.new_zeros(1), count_R.cumsum(0)))
    table = batch.block_table_SC[batch.slots_R.long()]
    used = torch.arange(table.shape[1], device=table.device) < count_R[:, None]
    last_R = (length_R - 1) % block_size + 1
    return Pages(indptr_R1.int(), table[used].int(), last_R.int())


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return the memory for parts of results, which all calls share: they run one after the other."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def _plain(batch: RaggedBatch, softmax: Softmax, scales: KVScales | None) -> None:
    """Raise ValueError for what FlashInfer's attention does not take, or takes otherwise."""
    for name, there in {
        "sinks": softmax.sinks_H, "slopes": softmax.slopes_H, "scales": scales, "trees": batch.tree,
        "pictures": batch.ahead_T, "biases": softmax.bias_HL,
    }.items():  # fmt: skip
        if there is not None:
            raise ValueError(f"FlashInfer's attention is not called with {name}.")


def paged_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, softmax: Softmax, scales: Any = None
) -> Call:
    """Attention of rows of one token with the wrapper for decoding, of others with that for prefills."""
    flashinfer = importlib.import_module("flashinfer")
    _plain(batch, softmax, scales)
    heads, (kv_heads, block_size, width) = q_THD.shape[1], k_cache.shape[1:]
    table, workspace = pages(batch, block_size), _workspace(q_THD.device)
    left = -1 if softmax.window is None else softmax.window - 1  # it does not count the query's own token
    options = {
        "sm_scale": softmax.scale, "window_left": left, "logits_soft_cap": softmax.softcap, "q_data_type": q_THD.dtype,
        "kv_data_type": k_cache.dtype,
    }  # fmt: skip
    if batch.tokens_each == 1:
        # Its matrix units pay from four query heads on that share keys, as its own documentation says
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=heads >= 4 * kv_heads
        )
        wrapper.plan(*table, heads, kv_heads, width, block_size, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.start_R1.int(), *table, heads, kv_heads, width, block_size, causal=True, **options)
    return lambda: wrapper.run(q_THD, (k_cache, v_cache))


def decode_attention(projected: Projected, batch: RaggedBatch, softmax: Softmax, buffer: Any = None) -> Call:
    """A decode step's attention from the projection on. It rotates in place, in the projection."""
    flashinfer, p = importlib.import_module("flashinfer"), projected
    if p.q_norm_D is not None or p.v_norm or buffer is not None:
        raise ValueError("FlashInfer's rotation and attention have no norms of heads, and round nothing.")
    caches, width = (p.k_cache_NGPD, p.v_cache_NGPD), p.k_cache_NGPD.shape[3]
    q_THD, k_TGD, v_TGD = split_heads(p.qkv_TX, p.num_heads, p.num_kv_heads, width)
    attend = paged_attention(q_THD, *caches, batch, softmax, p.scales)
    table, rows = pages(batch, p.k_cache_NGPD.shape[2]), torch.arange(len(q_THD), device=q_THD.device).int()
    places_T = (batch.kv_len_R - 1).int()  # in the pages
    rotate = None if p.cos_sin_ZY is None else rope(q_THD, k_TGD, p.cos_sin_ZY, p.positions_T)

    def step() -> Tensor:
        if rotate is not None:
            rotate()
        flashinfer.append_paged_kv_cache(
            k_TGD, v_TGD, rows, places_T, caches, table.indices_I, table.indptr_R1, table.last_R, "HND"
        )
        out_THD: Tensor = attend()
        return out_THD

    return step


def latent_attention(
    q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor | LatentLevels, batch: RaggedBatch, *, scale: float
) -> Call:
    """Attention to latent vectors, which FlashInfer reads as two caches."""
    flashinfer = importlib.import_module("flashinfer")
    if not isinstance(cache_NPW, Tensor):
        raise ValueError("FlashInfer's attention to latents is not called with 8-bit levels.")
    if batch.tree is not None:
        raise ValueError("FlashInfer's attention is not called with trees.")
    (heads, rank), rotated, block_size = q_THL.shape[1:], q_THY.shape[-1], cache_NPW.shape[1]
    table = pages(batch, block_size)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(q_THL.device))
    wrapper.plan(
        batch.start_R1.int(), table.indptr_R1, table.indices_I, batch.kv_len_R.int(), heads, rank, rotated, block_size,
        True, scale, q_THL.dtype, cache_NPW.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q_THL, q_THY, cache_NPW[..., :rank], cache_NPW[..., rank:])


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> Call:
    """The norm, or with a residual the sum and the norm in place."""
    flashinfer = importlib.import_module("flashinfer")
    if weight_M.dtype != x_TM.dtype:
        raise ValueError("FlashInfer's norm takes weights in the dtype of the activations.")
    if residual_TM is None:
        return lambda: (flashinfer.rmsnorm(x_TM, weight_M, eps), x_TM)

    def fused() -> tuple[Tensor, Tensor]:
        flashinfer.fused_add_rmsnorm(x_TM, residual_TM, weight_M, eps)
        return x_TM, residual_TM

    return fused


def gated_activation(x_T2F: Tensor, kind: str) -> Call:
    """The activation of a gated pair, gate first."""
    flashinfer = importlib.import_module("flashinfer")
    names = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
    if kind not in names:
        raise ValueError(f"FlashInfer has no gated {kind}.")
    function = getattr(flashinfer, names[kind])
    return lambda: function(x_T2F)


def rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> Call:
    """The rotation, in place."""
    rotate, positions_T = importlib.import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace, positions_T.int()

    def rotated() -> tuple[Tensor, Tensor]:
        rotate(positions_T, q_THD.flatten(1), k_TGD.flatten(1), q_THD.shape[-1], cos_sin_ZY, is_neox=True)
        return q_THD, k_TGD

    return rotated


def sample(logits_RV: Tensor, *tables: Any) -> Call:
    """The greedy choice: the draw from the one most probable token."""
    draw = importlib.import_module("flashinfer").sampling.top_k_top_p_sampling_from_logits
    return lambda: draw(logits_RV, 1, 1.0, filter_apply_order="joint")


PEERS: dict[str, Callable[..., Call]] = {
    each.__name__: each
    for each in (decode_attention, paged_attention, latent_attention, rms_norm, gated_activation, rope, sample)
}


def first_calls(device: torch.device, names: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16) -> None:
    """Call each peer, or those of some ops, on the smallest real case of one token a row and of several that it takes,
    and print how long that took, or in which words it failed."""
    for name in names or PEERS:
        called = set[bool]()
        for case in sorted(OPS[name].cases().real, key=lambda case: case.cost(2).bytes):
            if _alone(case) in called:
                continue
            started = time.monotonic()
            try:
                PEERS[name](*case.inputs(dtype, device), **case.options(dtype, device))()
                told = f"{time.monotonic() - started:.1f} s"
            except ValueError as error:
                sys.stdout.write(f"{name} {case.label}: not taken: {error}\n")
                continue
            except RuntimeError as error:
                told = f"failed: {str(error)[-500:]}"
            called.add(_alone(case))
            sys.stdout.write(f"{name} {case.label}: {told}\n")
            sys.stdout.flush()


def _alone(case: Any) -> bool:
    """Return True for attention of rows of one token each."""
    return all(row[0] == 1 for row in case.rows) if isinstance(getattr(case, "rows", None), tuple) else False


if __name__ == "__main__":
    first_calls(torch.device("cuda"), sys.argv[1:])
