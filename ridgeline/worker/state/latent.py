"""Paged latent vectors, for latent attention: one vector a token, which all heads read. Rows that bring many tokens
have keys and values made of them (expanding.py).

Legend:
    N  block ids
    P  tokens per block
    W  numbers that are kept of a token
    R  rows
    T  tokens of the step
    H  heads
    L  width of a latent
    Y  width of the rotated part
    V  width of a value
    X  columns of a head's query, or of all heads' values
    S  slots
    C  columns of a block table
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.specs.latent import LatentAttentionSpec, LatentSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.latent.op import ITEM_QUERIES
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.layers.latent_attention import Latents
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.expanding import Expanding, expanding, long_rows, without
from ridgeline.worker.state.states import DeviceRows, Verified


class PagedLatents:
    """A `GroupState` that writes the step's latents, then attends to all that is cached."""

    works: dict[LatentAttentionSpec, Work]
    place_T: Tensor

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None:
        own = memory.layout.groups[group]
        assert isinstance(own.spec, LatentSpec)
        self.ops, self._spec, self._itemsize = ops, own.spec, dtype.itemsize
        self._mixers = [_mixer(model, layer) for layer in own.layers]
        self._block_size, self._layer_step = memory.layout.tokens_held, memory.layout.layer_step(group)
        shape = self._block_size, own.spec.width
        self.views = [memory.view(group, index, dtype, shape) for index in range(len(own.layers))]
        # All that is cached of tokens, as words by block id, part, head and token
        token_bytes, words = own.spec.width * dtype.itemsize, memory.units[group].dtype
        words = words if token_bytes % words.itemsize == 0 else torch.uint8
        self._tokens = memory.view(group, 0, words, (1, 1, self._block_size, token_bytes // words.itemsize))

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.place_T = place_T
        self.works = {mixer: self._work(mixer, rows, block_table_SC) for mixer in dict.fromkeys(self._mixers)}

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Move the latents of a tree's nodes that stay behind each other, as `PagedKV` does."""
        if verified.path_RK is None or not self.views:
            return
        units = GroupUnits(self._tokens, block_table_SC, self._block_size, len(self.views), self._layer_step)
        self.ops.step_compact(verified.slots_R, verified.kv_len_R, verified.num_logits_R, verified.path_RK, units)

    def _work(self, mixer: LatentAttentionSpec, rows: DeviceRows, block_table_SC: Tensor) -> Work:
        long_R = long_rows(rows, mixer)
        if self.ops.deterministic or not long_R.any():  # (a row's bits must not depend on its chunks)
            return Work(self._batch(mixer, rows, block_table_SC), None, ())
        token_bytes = self._spec.width * self._itemsize
        long = tuple(expanding(rows, long_R, block_table_SC, self._block_size, token_bytes))
        others, other_T = without(rows, long_R)
        return Work(self._batch(mixer, others, block_table_SC) if others.num_tokens else None, other_T, long)

    def _batch(self, mixer: LatentAttentionSpec, rows: DeviceRows, block_table_SC: Tensor) -> RaggedBatch:
        shape = AttentionShape(
            num_tokens=rows.num_tokens,
            tokens_each=rows.tokens_each,
            num_heads=mixer.num_heads,
            num_kv_heads=1,
            head_bytes=self._spec.width * self._itemsize,
            item_queries=ITEM_QUERIES,
            trees=rows.tree is not None,
        )
        schedule = self.ops.attention_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, shape)
        return rows.batch(block_table_SC, schedule)

    def layer(self, index: int) -> LatentLayer:
        return LatentLayer(self, self._mixers[index], self.views[index])


def _mixer(model: ModelSpec, layer: int) -> LatentAttentionSpec:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


class Work(NamedTuple):
    """The ways in which a step's rows attend.

    batch: those that attend to the latents themselves; None: none do. tokens_T: their tokens; None: all of the step's.
    long: those for which keys and values are made.
    """

    batch: RaggedBatch | None
    tokens_T: Tensor | None
    long: tuple[Expanding, ...]


class LatentLayer:
    """The latents of one layer, a `layers.latent_attention.AttendsToLatents`."""

    def __init__(self, group: PagedLatents, mixer: LatentAttentionSpec, cache_NPW: Tensor) -> None:
        self._group, self._mixer, self._cache_NPW = group, mixer, cache_NPW

    def attend_to_latents(self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents) -> Tensor:
        """Return the heads' values, [T, H V]."""
        spec, work = latents.spec, self._group.works[self._mixer]
        q_THY = latents.ops.latent_kv(
            q_THX, latent_TW, latents.weight_L, spec.norm.eps, latents.cos_sin_ZY, latents.angles(positions_T),
            spec.interleaved, self._cache_NPW, self._group.place_T,
        )  # fmt: skip
        if work.tokens_T is None:
            return self._attended(q_THX, q_THY, work, latents)
        out_THV = q_THX.new_empty(len(q_THX), spec.num_heads, spec.value_dim)
        for rows in work.long:
            rows.attend(out_THV, q_THX, q_THY, self._cache_NPW, latents)
        out_TX = out_THV.flatten(1)
        if work.batch is not None:
            others = q_THX[work.tokens_T], q_THY[work.tokens_T]
            out_TX.index_copy_(0, work.tokens_T, self._attended(*others, work, latents))
        return out_TX

    def _attended(self, q_THX: Tensor, q_THY: Tensor, work: Work, latents: Latents) -> Tensor:
        """Attend to the latents themselves: [T, H V]."""
        assert work.batch is not None
        spec, expand = latents.spec, latents.expand
        q_THL = expand.queries(q_THX[..., : spec.key_dim])
        attended_THL = latents.ops.latent_attention(q_THL, q_THY, self._cache_NPW, work.batch, scale=spec.scale)
        return expand.values(attended_THL)
