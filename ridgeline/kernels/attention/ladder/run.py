"""Rungs of the attention ladder as calls, over given operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention.ladder.backward import FusedBackward
from ridgeline.kernels.attention.ladder.ideas import rotation
from ridgeline.kernels.attention.ladder.naive import naive
from ridgeline.kernels.attention.ladder.online import online
from ridgeline.kernels.attention.ladder.rungs import AttentionRung, BackwardRung
from ridgeline.kernels.attention.ladder.tiled import tiled
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.attention.triton_sdpa import (
    Intervals,
    KeyMasks,
    atomic_gradients,
    attend_intervals,
    ordered_gradients,
    output_products,
)
from ridgeline.kernels.base.op import Platform

Call = Callable[[], Tensor]
Writes = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def runs_here(rung: AttentionRung | BackwardRung, device: torch.device) -> bool:
    """Return True if the device runs the rung; a CPU does so by Triton's interpreter."""
    return not rung.hopper or (device.type == "cuda" and Platform.of(device).arch == "sm_90")


def loaded(rung: AttentionRung, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Call:
    """Return a call that gives the causal attention of these operands, [B, H, T, D]. All are contiguous.

    What an engine has at hand, such as pages of keys and a list of work, is made here and not in the call. Memory for
    results holds NaN before the first call.
    """
    return LOADERS[rung.name](q_BHTD, k_BGTD, v_BGTD)


def _plain(function: Writes) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def load(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Call:
        out_BHTD = torch.full_like(q_BHTD, torch.nan)

        def call() -> Tensor:
            function(q_BHTD, k_BGTD, v_BGTD, out_BHTD)
            return out_BHTD

        return call

    return load


def _intervals(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Call:
    length, size = q_BHTD.shape[2:]
    intervals = KeyMasks().intervals(length, length, q_BHTD.device)
    return lambda: attend_intervals(q_BHTD, k_BGTD, v_BGTD, intervals, size**-0.5)[0]


def _engine(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Call:
    """The engine's kernel, whose keys lie in pages and whose queries lie token by token."""
    from ridgeline.kernels.attention.paged import hopper, hopper_items  # Gluon: no CPU runs it

    (batch, heads, length, size), groups, block = q_BHTD.shape, k_BGTD.shape[1], 64
    pages, device = -(-length // block), q_BHTD.device
    caches = tuple(_paged(x, block) for x in (k_BGTD, v_BGTD))
    starts = torch.arange(0, batch * length + 1, length, device=device, dtype=torch.int32)
    rows = RaggedBatch(
        slots_R=torch.arange(batch, device=device, dtype=torch.int32),
        block_table_SC=torch.arange(batch * pages, device=device, dtype=torch.int32).view(batch, pages),
        start_R1=starts, kv_len_R=torch.full((batch,), length, device=device, dtype=torch.int32), tokens_each=length,
        kv_bound_R=np.full(batch, length),  # as the engine knows it: so many heads together fit the cache
    )  # fmt: skip
    q_THD = q_BHTD.transpose(1, 2).reshape(batch * length, heads, size).contiguous()
    out_THD = torch.full_like(q_THD, torch.nan)
    queries, pack = hopper_items.tile_shape(size, heads // groups, batch * length, batch)
    items = hopper_items.prefill_items(
        rows.start_R1, rows.kv_len_R, rows.slots_R, batch * length, kv_row_bytes=4 * groups * size, queries=queries,
        pack=pack,
    )  # fmt: skip

    def call() -> Tensor:
        hopper.prefill_attention(q_THD, (caches[0], caches[1]), rows, items, Softmax(size**-0.5), out_THD)
        return out_THD.view(batch, length, heads, size).transpose(1, 2)

    return call


def _paged(x_BGTD: Tensor, block: int) -> Tensor:
    """Return keys or values as pages, [N, G, P, D]; the last page of a sequence is filled up with zeros."""
    batch, groups, length, size = x_BGTD.shape
    pages = -(-length // block)
    whole = torch.nn.functional.pad(x_BGTD, (0, 0, 0, pages * block - length))
    return whole.view(batch, groups, pages, block, size).transpose(1, 2).reshape(-1, groups, block, size).contiguous()


def _pingpong(**switches: Any) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def load(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Call:
        from ridgeline.kernels.attention.ladder.pingpong import Pingpong, PingpongSwitches  # Gluon: no CPU runs it

        if switches.get("fp8"):
            turned = rotation(q_BHTD.shape[-1]).to(q_BHTD.device, torch.float32)
            q_BHTD, k_BGTD = ((x.float() @ turned).to(x.dtype) for x in (q_BHTD, k_BGTD))
        return Pingpong(q_BHTD, k_BGTD, v_BGTD, PingpongSwitches(**switches))

    return load


FP8: dict[str, Any] = {"fp8": True, "polynomials": 1, "threshold": True}
LOADERS: dict[str, Callable[[Tensor, Tensor, Tensor], Call]] = {
    "naive": _plain(naive),
    "online": _plain(online),
    "tiled": _plain(tiled),
    "intervals": _intervals,
    "engine": _engine,
    "pingpong": _pingpong(),
    "polynomial": _pingpong(polynomials=1),
    "threshold": _pingpong(threshold=True),
    "longest": _pingpong(longest=True),
    "fp8": _pingpong(**FP8),
    "ahead": _pingpong(**FP8, ahead=True),
    "beside": _pingpong(threshold=True, longest=True, beside=True),
    "fp8-beside": _pingpong(**FP8, longest=True, beside=True),
}


def loaded_backward(
    rung: BackwardRung, qkv: tuple[Tensor, Tensor, Tensor], grad_BHTD: Tensor
) -> Callable[[], Sequence[Tensor]]:
    """Return a call that gives the gradients of q, k and v of causal attention. All operands are contiguous; the output
    and its logarithms are computed here."""
    length, size = grad_BHTD.shape[2:]
    intervals, scale = KeyMasks().intervals(length, length, grad_BHTD.device), size**-0.5
    out_BHTD, log_BHT = attend_intervals(*qkv, intervals, scale)
    if rung.products == 5 and not rung.hopper:
        fused = FusedBackward(*qkv, out_BHTD, log_BHT)
        return lambda: fused(grad_BHTD)
    way, given = (atomic_gradients if rung.hopper else ordered_gradients), Intervals(intervals)
    return lambda: way(qkv, grad_BHTD, log_BHT, output_products(out_BHTD, grad_BHTD), given, scale)
