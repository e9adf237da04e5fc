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

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.specs.model import AttentionSpec, ModelSpec
from ridgeline.core.specs.state import KVSpec
from ridgeline.kernels.attention.paged.cost import WORKSPACE_BYTES
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.base.kv_cache import KVScales, torch_type
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.layers.heads import Heads
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows, Verified


class Scheduled(NamedTuple):
    """All that the schedules of a group's layers depend on, beside their common spec."""

    num_heads: int
    capped: bool
    alibi: bool  # or biases by distance
    ahead: bool

    @staticmethod
    def of(mixer: AttentionSpec) -> Scheduled:
        alibi = mixer.alibi or mixer.relative is not None
        return Scheduled(mixer.num_heads, mixer.softcap is not None, alibi, mixer.ahead)


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
        heads, tokens, width = spec.num_kv_heads, memory.layout.tokens_held, spec.head_dim
        self._dtype, kept = dtype, torch_type(spec.format, dtype)
        widens = spec.format.quantized and own.layers
        self._wide = _memory_for_wide(memory, spec, dtype, ops) if widens else None
        self.views: list[tuple[Tensor, Tensor]] = []  # by layer: keys and values, [N, G, P, D]
        self.scales: list[KVScales | None] = []  # by layer: those that lie behind levels
        by_token = ops.platform.device_type == "cpu"
        inner = (tokens, heads) if by_token else (heads, tokens)
        for index in range(len(own.layers)):
            units = memory.view(group, index, kept, (2, *inner, width))
            units = units.transpose(2, 3) if by_token else units
            self.views.append((units[:, 0], units[:, 1]))
            self.scales.append(None)
            if spec.format.scales == "row":
                levels = 2 * tokens * heads * width
                pairs = memory.view(group, index, torch.bfloat16, (*inner, 2), offset=levels)
                self.scales[-1] = KVScales(pairs_NGP2=pairs.transpose(1, 2) if by_token else pairs)

        # All that is cached of tokens, as words by block id, head and token
        self._block_size, self._layer_step = tokens, memory.layout.layer_step(group)
        head_bytes, words = width * kept.itemsize, memory.units[group].dtype
        words = words if head_bytes % words.itemsize == 0 else torch.uint8
        shapes = [(words, 2, head_bytes // words.itemsize, 0)]
        if spec.format.scales == "row":
            shapes.append((torch.int32, 1, 1, 2 * tokens * heads * head_bytes))
        self._tokens: list[Tensor] = []
        for form, parts, count, offset in shapes:
            units = memory.view(group, 0, form, (parts, *inner, count), offset)
            self._tokens.append(units.transpose(2, 3) if by_token else units)

        # The keys that hopper.py would read: it converts none
        plain = self.views[0][0] if self.views and kept == dtype else None
        self._for_hopper = plain if self._wide is None else self._wide[0]

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.place_T = place_T
        if rows.windows_causal and self._spec.window is not None:
            rows = replace(rows, tree=None)
        self.batches = {way: self._batch(way, rows, block_table_SC) for way in dict.fromkeys(self._ways)}

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Move the keys and values of a tree's nodes that stay behind each other. The others lie behind their request's
        last token, as those of wrong drafts in chains do, and are overwritten."""
        if verified.path_RK is None or not self.views:
            return
        for units_NJGPW in self._tokens:
            units = GroupUnits(units_NJGPW, block_table_SC, self._block_size, len(self.views), self._layer_step)
            self.ops.step_compact(verified.slots_R, verified.kv_len_R, verified.num_logits_R, verified.path_RK, units)

    def _batch(self, way: Scheduled, rows: DeviceRows, block_table_SC: Tensor) -> RaggedBatch:
        rows = rows if way.ahead or rows.ahead_T is None else replace(rows, ahead_T=None)
        shape = AttentionShape(
            num_tokens=rows.num_tokens,
            tokens_each=rows.tokens_each,
            num_heads=way.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            window=self._spec.window,
            cache_NGPD=None if way.capped or way.alibi else self._for_hopper,
            prefix_4R=rows.prefix_4R,
            alibi=way.alibi,
            head_bytes=self._spec.head_dim * self._dtype.itemsize,
            widened=self._wide is not None,
            trees=rows.tree is not None,
            ahead=rows.ahead_T is not None,
            most_keys=block_table_SC.shape[1] * self._block_size,
        )
        schedule = self.ops.attention_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, shape)
        return rows.batch(block_table_SC, schedule, self._wide)

    def layer(self, index: int) -> PagedLayer:
        return PagedLayer(self, self._ways[index], *self.views[index], self.scales[index])


def _memory_for_wide(memory: StateMemory, spec: KVSpec, dtype: torch.dtype, ops: Ops) -> tuple[Tensor, Tensor] | None:
    """Return memory for 16-bit keys and values of long rows [W, G, P, D], where a kernel reads them faster than levels.

    All groups together take the bytes that `worker.memory` keeps for attention.
    """
    block_size, arch = memory.layout.tokens_held, ops.platform.arch
    if arch != "sm_90" or ops.chosen["attention_schedule"] != "triton":
        return None
    from ridgeline.kernels.attention.paged.hopper import supports  # needs Triton, which a CPU need not have

    if not supports(arch, dtype, spec.head_dim, block_size):
        return None
    shape = spec.num_kv_heads, block_size, spec.head_dim
    blocks = WORKSPACE_BYTES // len(memory.layout.groups) // (2 * prod(shape) * dtype.itemsize)
    units = torch.empty(blocks, 2, *shape, dtype=dtype, device=memory.device)
    return units[:, 0], units[:, 1]


class PagedLayer:
    """The keys and values of one layer, a `layers.attention.Attends`."""

    def __init__(
        self, group: PagedKV, way: Scheduled, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, scales: KVScales | None
    ) -> None:
        self._group, self._way, self._k, self._v, self._scales = group, way, k_cache_NGPD, v_cache_NGPD, scales

    def attend(
        self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, room: Rounded | None = None
    ) -> Tensor | Rounded:
        """Return the attended heads, [T, H * D], or `room` with them, rounded."""
        batch, ops = self._group.batches[self._way], self._group.ops
        projected = self._projected(qkv_TX, positions_T, heads)
        if batch.tokens_each == 1 and batch.tree is None:
            out_THD = ops.decode_attention(projected, batch, heads.softmax, room)
            if room is not None:
                return room
        else:
            q_THD = ops.rope_kv(projected)
            out_THD = ops.paged_attention(q_THD, self._k, self._v, batch, heads.softmax, projected.scales)
        return out_THD.flatten(1)

    def keep(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> None:
        """Store the keys and values alone."""
        self._group.ops.rope_kv(self._projected(qkv_TX, positions_T, heads))

    def _projected(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> Projected:
        group, spec = self._group, heads.spec
        scales = self._scales if heads.kv_scales_G2 is None else heads.kv_scales_of(self._k)
        return Projected(
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
            spec.v_norm,
            scales,
        )
