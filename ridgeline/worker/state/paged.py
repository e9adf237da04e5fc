"""Paged keys and values, for attention with and without a window.

Legend:
    N  block ids
    G  key/value heads
    P  tokens per block
    D  head width
    T  tokens of the step
    R  rows
    H  query heads
    X  (H + 2 G) D, columns of the fused projection; (H + G) D if values are the keys' projection
    S  slots
    C  columns of a block table
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.model_spec import AttentionSpec, ModelSpec
from ridgeline.core.state_spec import KVSpec
from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows


class Scheduled(NamedTuple):
    """All that the schedules of a group's layers depend on, beside their common spec."""

    num_heads: int
    capped: bool
    alibi: bool

    @staticmethod
    def of(mixer: AttentionSpec) -> Scheduled:
        return Scheduled(mixer.num_heads, mixer.softcap is not None, mixer.alibi)


class PagedKV:
    """A `GroupState` that writes the step's keys and values, then attends to all that is cached.

    Layers may remember alike and attend otherwise. Those that attend alike share a schedule.

    A GPU reads a block head by head, so there a head's tokens lie together. A CPU copies whole blocks beside each other
    before it attends, so there a token's heads lie together: the copy then has the keys of all heads without a
    transposition.
    """

    batches: dict[Scheduled, RaggedBatch]
    place_T: Tensor

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None:
        own, spec = memory.layout.groups[group], memory.layout.groups[group].spec
        assert isinstance(spec, KVSpec)
        self.ops, self._spec = ops, spec
        self._ways = [Scheduled.of(model.layers[layer].attention) for layer in own.layers]
        heads, tokens, width = spec.num_kv_heads, memory.layout.block_size, spec.head_dim
        self.views: list[tuple[Tensor, Tensor]] = []  # by layer: keys and values, [N, G, P, D]
        for index in range(len(own.layers)):
            if ops.platform.device_type == "cpu":
                units = memory.view(group, index, dtype, (2, tokens, heads, width)).transpose(2, 3)
            else:
                units = memory.view(group, index, dtype, (2, heads, tokens, width))
            self.views.append((units[:, 0], units[:, 1]))

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.place_T = place_T
        self.batches = {way: self._batch(way, rows, block_table_SC) for way in dict.fromkeys(self._ways)}

    def _batch(self, way: Scheduled, rows: DeviceRows, block_table_SC: Tensor) -> RaggedBatch:
        return RaggedBatch(
            slots_R=rows.slots_R,
            block_table_SC=block_table_SC,
            start_R1=rows.start_R1,
            kv_len_R=rows.kv_len_R,
            tokens_each=rows.tokens_each,
            num_tokens_R=rows.num_tokens_R,
            kv_bound_R=rows.kv_bound_R,
            schedule=self.ops.attention_schedule(
                rows.start_R1,
                rows.kv_len_R,
                rows.slots_R,
                num_tokens=rows.num_tokens,
                tokens_each=rows.tokens_each,
                num_heads=way.num_heads,
                num_kv_heads=self._spec.num_kv_heads,
                window=self._spec.window,
                cache_NGPD=None if way.capped or way.alibi else self.views[0][0],
                prefix_4R=rows.prefix_4R,
                alibi=way.alibi,
                head_bytes=self._spec.head_dim * self.views[0][0].element_size(),
            ),
        )

    def layer(self, index: int) -> PagedLayer:
        return PagedLayer(self, self._ways[index], *self.views[index])


class PagedLayer:
    """The keys and values of one layer, a `layers.attention.Attends`."""

    def __init__(self, group: PagedKV, way: Scheduled, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor) -> None:
        self._group, self._way, self._k, self._v = group, way, k_cache_NGPD, v_cache_NGPD

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        group, spec = self._group, heads.spec
        batch, ops = group.batches[self._way], group.ops
        projected = (
            qkv_TX,
            heads.q_norm_D,
            heads.k_norm_D,
            heads.eps,
            heads.cos_sin_ZY,
            positions_T,
            self._k,
            self._v,
            group.place_T,
            spec.num_heads,
            spec.num_kv_heads,
        )
        scale, window, softcap = spec.scale, spec.window, spec.softcap
        sinks_H, slopes_H = heads.sinks_H, heads.slopes_H
        if batch.tokens_each == 1:
            out_THD = ops.decode_attention(
                *projected, batch, scale=scale, window=window, sinks_H=sinks_H, softcap=softcap, slopes_H=slopes_H,
                v_norm=spec.v_norm,
            )  # fmt: skip
        else:
            q_THD = ops.rope_kv(*projected, spec.v_norm)
            out_THD = ops.paged_attention(
                q_THD, self._k, self._v, batch,
                scale=scale, window=window, sinks_H=sinks_H, softcap=softcap, slopes_H=slopes_H,
            )  # fmt: skip
        return out_THD.flatten(1)
