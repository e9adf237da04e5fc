"""Rows of latent attention that bring many tokens: which these are, and attention over keys and values made for them.

Latents are gathered from the cache, no matter which step wrote them, and expanded for as many heads at once as fit a
fixed amount of memory. So a prompt's first chunk, its later ones and what follows a hit in the prefix cache are treated
alike.

Legend:
    R  rows
    T  tokens of the step
    J  cached tokens of the long rows
    H  heads
    Y  width of the rotated part
    V  width of a value
    X  columns of a head's query
    S  slots
    C  columns of a block table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.kernels.attention.expanded.cost import EXPANDED_BYTES, worth_expanding
from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.latent.op import LatentCache, kept
from ridgeline.kernels.base.tree import Tree
from ridgeline.layers.latent_attention import Latents
from ridgeline.worker.state.states import DeviceRows
from ridgeline.worker.upload import upload

# How many times as long a FLOP of a prompt takes against latents as with keys and values, where that was timed: 230 to
# 290 TFLOP/s with 128 heads beside 560 to 590, and 80 beside 190 to 260 with 16
PACES = {"sm_90": 2.0}


@dataclass(frozen=True)
class Expanding:
    """Long rows whose latents are expanded together. block_J, offset_J: where these lie in the cache, int32."""

    rows: LongRows
    block_J: Tensor
    offset_J: Tensor

    def attend(
        self,
        out_THV: Tensor,
        q_THX: Tensor,
        q_THY: Tensor,
        cache: LatentCache,
        latents: Latents,
        chosen_TW: Tensor | None = None,
    ) -> None:
        """Store what the rows' tokens attend to. q_THX: queries as projected. q_THY: their rotated parts. chosen_TW:
        bits of the keys that they attend to, 64 a word; None: they attend to all."""
        spec = latents.spec
        vectors = kept(cache, (self.block_J, self.offset_J), spec.rank, q_THX.dtype)
        attend_expanded(out_THV, (q_THX[..., : spec.key_dim], q_THY), vectors, self.rows, latents, chosen_TW=chosen_TW)


def attend_expanded(
    out_THV: Tensor,
    queries: tuple[Tensor, Tensor],
    vectors: tuple[Tensor, Tensor],
    rows: LongRows,
    latents: Latents,
    *,
    first_head: int = 0,
    chosen_TW: Tensor | None = None,
) -> None:
    """Store what the rows' tokens attend to, with keys and values made for as many heads at once as fit the memory.

    queries: as projected without their rotated parts, and these. vectors: the rows' latents and rotated parts.
    first_head: the number of the first of these heads among the layer's. chosen_TW: as in `Expanding.attend`.
    """
    (q_THK, q_THY), (latent_JL, r_JY), spec, heads = queries, vectors, latents.spec, out_THV.shape[1]
    each = _heads_at_once(spec, len(r_JY), r_JY.element_size())
    for first in range(0, heads, each):
        some = slice(first, min(first + each, heads))
        made = slice(first_head + some.start, first_head + some.stop)
        k_JHK, v_JHV = latents.expand.keys_and_values(latent_JL, made)
        latents.ops.expanded_attention(
            out_THV[:, some], q_THK[:, some], q_THY[:, some], k_JHK, v_JHV, r_JY, rows, scale=spec.scale,
            chosen_TW=chosen_TW,
        )  # fmt: skip


def long_rows(rows: DeviceRows, mixer: LatentAttentionSpec, arch: str = "") -> np.ndarray:
    """Return True for rows that are cheaper expanded: bool [R]. Rows of captured graphs, whose lengths the host does
    not know, are not, and neither are trees."""
    if rows.num_tokens_R is None or rows.kv_bound_R is None or rows.tree is not None:
        return np.zeros(len(rows.slots_R), bool)
    return expands(rows.num_tokens_R, rows.kv_bound_R, mixer, arch)


def expands(num_tokens_R: np.ndarray, kv_bound_R: np.ndarray, mixer: LatentAttentionSpec, arch: str) -> np.ndarray:
    """Return True for rows of these lengths that are cheaper expanded: bool [R]. arch: that of the platform."""
    sizes = {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim, "rank": mixer.rank}
    return worth_expanding(num_tokens_R, kv_bound_R, **sizes, pace=PACES.get(arch, 1.0))


def without(rows: DeviceRows, long_R: np.ndarray) -> tuple[DeviceRows, Tensor]:
    """Return the other rows, as if the step had no more, and which of its tokens are theirs."""
    assert rows.num_tokens_R is not None
    assert rows.kv_bound_R is not None
    other_R = np.flatnonzero(~long_R)
    counts_R = rows.num_tokens_R[other_R].astype(np.int64)
    begin_R = (np.cumsum(rows.num_tokens_R, dtype=np.int64) - rows.num_tokens_R)[other_R]
    start_R1 = np.concatenate([[0], np.cumsum(counts_R)])
    token_T = np.arange(start_R1[-1]) + np.repeat(begin_R - start_R1[:-1], counts_R)
    device, rows_R = rows.slots_R.device, len(other_R)
    sent = upload(np.concatenate([other_R, start_R1, token_T]), device)
    at_R, start, token = sent.split((rows_R, rows_R + 1, len(token_T)))
    found = replace(
        rows,
        slots_R=rows.slots_R[at_R],
        start_R1=start.to(rows.start_R1.dtype),
        kv_len_R=rows.kv_len_R[at_R],
        num_tokens=len(token_T),
        tokens_each=int(counts_R[0]) if len(set(counts_R.tolist())) == 1 else 0,
        num_tokens_R=rows.num_tokens_R[other_R],
        kv_bound_R=rows.kv_bound_R[other_R],
        tree=None if rows.tree is None else Tree(*(each_T[token] for each_T in rows.tree)),
    )
    return found, token


def expanding(
    rows: DeviceRows, long_R: np.ndarray, block_table_SC: Tensor, block_size: int, token_bytes: int
) -> Iterator[Expanding]:
    """Yield the long rows, as many at once as have vectors of EXPANDED_BYTES, or one."""
    assert rows.num_tokens_R is not None
    assert rows.kv_bound_R is not None
    first_R = np.cumsum(rows.num_tokens_R, dtype=np.int64) - rows.num_tokens_R
    together: list[int] = []
    keys = 0
    for row in np.flatnonzero(long_R).tolist():
        bound = int(rows.kv_bound_R[row])
        if together and (keys + bound) * token_bytes > EXPANDED_BYTES:
            yield _expanding(rows, np.array(together), first_R, block_table_SC, block_size)
            together, keys = [], 0
        together.append(row)
        keys += bound
    if together:
        yield _expanding(rows, np.array(together), first_R, block_table_SC, block_size)


def _expanding(
    rows: DeviceRows, at_R: np.ndarray, first_R: np.ndarray, block_table_SC: Tensor, block_size: int
) -> Expanding:
    assert rows.num_tokens_R is not None
    assert rows.kv_bound_R is not None
    device, bound_R = rows.slots_R.device, rows.kv_bound_R[at_R].astype(np.int64)
    begin_R = np.cumsum(bound_R) - bound_R
    sent_at_R, sent_bound_R, sent_begin_R = upload(np.stack([at_R, bound_R, begin_R]), device)
    kv_len_R = rows.kv_len_R[sent_at_R]
    row_J = torch.repeat_interleave(sent_bound_R, output_size=int(bound_R.sum()))
    # A row that was stopped has fewer keys than the host counts: its last stands for those that are not there
    key_J = torch.arange(len(row_J), device=device) - sent_begin_R[row_J]
    key_J = torch.minimum(key_J, kv_len_R.long()[row_J] - 1).clamp_(min=0)
    slot_J = rows.slots_R[sent_at_R].long()[row_J]
    return Expanding(
        LongRows(
            first_R=first_R[at_R],
            tokens_R=rows.num_tokens_R[at_R].astype(np.int64),
            begin_R=begin_R,
            bound_R=bound_R,
            kv_len_R=kv_len_R.int(),
        ),
        block_table_SC[slot_J, key_J // block_size].int(),
        (key_J % block_size).int(),
    )


def _heads_at_once(spec: LatentAttentionSpec, keys: int, itemsize: int) -> int:
    return max(1, EXPANDED_BYTES // (keys * (spec.key_dim + spec.value_dim) * itemsize))
