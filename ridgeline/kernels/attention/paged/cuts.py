"""The ways of a prompt's attention over an 8-bit cache that a sweep tries beside the chosen one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.attention.paged.triton import paged_attention
from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.base.kv_cache import KVScales


@dataclass(frozen=True)
class Widened:
    """Keys and values become 16 bits wide in so many bytes before the prompt attends, as in a worker."""

    num_bytes: int = 1 << 28


def candidates(case: AttentionCase) -> tuple[Widened, ...]:
    return (Widened(),) if case.cache is not None else ()


def _attend(
    q_THD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, batch: RaggedBatch, *, scales: KVScales, cut: Widened, **options: Any
) -> Tensor:
    """Attend with the schedule of a step whose cache is widened, which is made here too."""
    heads, (_, kv_heads, block, dim) = q_THD.shape[1], k_NGPD.shape
    blocks = cut.num_bytes // (2 * q_THD.element_size() * kv_heads * block * dim)
    wide = torch.empty(blocks, 2, kv_heads, block, dim, dtype=q_THD.dtype, device=q_THD.device).unbind(1)
    shape = AttentionShape(
        num_tokens=len(q_THD), tokens_each=0, num_heads=heads, num_kv_heads=kv_heads, cache_NGPD=wide[0],
        head_bytes=dim * q_THD.element_size(), widened=True,
    )  # fmt: skip
    schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    batch = replace(batch, schedule=schedule, wide=(wide[0], wide[1]) if schedule.hopper else None, derived={})
    return paged_attention(q_THD, k_NGPD, v_NGPD, batch, **options, scales=scales)


def with_cut(cut: Widened) -> Callable[..., Tensor]:
    return partial(_attend, cut=cut)


OP_CUTS = {"paged_attention": Cuts(candidates, with_cut)}
