"""Paged latent vectors, for latent attention: one vector a token, which all heads read.

Legend:
    N  block ids
    P  tokens per block
    W  numbers that are kept of a token
    T  tokens of the step
    H  heads
    L  width of a latent
    X  columns of a head's query
    S  slots
    C  columns of a block table
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.latent_spec import LatentAttentionSpec, LatentSpec
from ridgeline.core.model_spec import ModelSpec
from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.kernels.latent_attention.op import ITEM_QUERIES
from ridgeline.kernels.ops import Ops
from ridgeline.layers.latent_attention import Latents
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows, Verified


class PagedLatents:
    """A `GroupState` that writes the step's latents, then attends to all that is cached."""

    batches: dict[int, RaggedBatch]
    place_T: Tensor

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None:
        own = memory.layout.groups[group]
        assert isinstance(own.spec, LatentSpec)
        self.ops, self._spec, self._itemsize = ops, own.spec, dtype.itemsize
        self._heads = [_heads(model, layer) for layer in own.layers]
        self._block_size, self._layer_step = memory.layout.tokens_held, memory.layout.layer_step(group)
        shape = self._block_size, own.spec.width
        self.views = [memory.view(group, index, dtype, shape) for index in range(len(own.layers))]
        # All that is cached of tokens, as words by block id, part, head and token
        token_bytes, words = own.spec.width * dtype.itemsize, memory.units[group].dtype
        words = words if token_bytes % words.itemsize == 0 else torch.uint8
        self._tokens = memory.view(group, 0, words, (1, 1, self._block_size, token_bytes // words.itemsize))

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.place_T = place_T
        self.batches = {heads: self._batch(heads, rows, block_table_SC) for heads in dict.fromkeys(self._heads)}

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Move the latents of a tree's nodes that stay behind each other, as `PagedKV` does."""
        if verified.path_RK is None or not self.views:
            return
        self.ops.step_compact(
            verified.slots_R, verified.kv_len_R, verified.num_logits_R, verified.path_RK, block_table_SC,
            self._block_size, self._tokens, len(self.views), self._layer_step,
        )  # fmt: skip

    def _batch(self, heads: int, rows: DeviceRows, block_table_SC: Tensor) -> RaggedBatch:
        schedule = self.ops.attention_schedule(
            rows.start_R1,
            rows.kv_len_R,
            rows.slots_R,
            num_tokens=rows.num_tokens,
            tokens_each=rows.tokens_each,
            num_heads=heads,
            num_kv_heads=1,
            head_bytes=self._spec.width * self._itemsize,
            item_queries=ITEM_QUERIES,
            trees=rows.tree is not None,
        )
        return rows.batch(block_table_SC, schedule)

    def layer(self, index: int) -> LatentLayer:
        return LatentLayer(self, self._heads[index], self.views[index])


def _heads(model: ModelSpec, layer: int) -> int:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer.num_heads


class LatentLayer:
    """The latents of one layer, a `layers.latent_attention.AttendsToLatents`."""

    def __init__(self, group: PagedLatents, heads: int, cache_NPW: Tensor) -> None:
        self._group, self._heads, self._cache_NPW = group, heads, cache_NPW

    def attend_to_latents(
        self, q_THL: Tensor, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents
    ) -> Tensor:
        """Return what was attended, [T, H, L]."""
        group, spec, ops = self._group, latents.spec, latents.ops
        q_THY = ops.latent_kv(
            q_THX, latent_TW, latents.weight_L, spec.norm.eps, latents.cos_sin_ZY, latents.angles(positions_T),
            spec.interleaved, self._cache_NPW, group.place_T,
        )  # fmt: skip
        return ops.latent_attention(q_THL, q_THY, self._cache_NPW, group.batches[self._heads], scale=spec.scale)
