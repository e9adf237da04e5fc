"""Paged latent vectors, for latent attention: one vector a token, which all heads read. Rows that bring many tokens
have keys and values made of them (expanding.py). Where there is an indexer, its keys are paged too, and rows of many
cached tokens attend to those that it chooses.

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

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.latent import LatentAttentionSpec, LatentSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.latent.op import ITEM_QUERIES, LatentCache, LatentLevels
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.attention.sparse.cost import worth_masking
from ridgeline.kernels.attention.sparse.op import IndexCache
from ridgeline.kernels.base.kv_cache import torch_type
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.layers.indexer import Index
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
        self.ops, self._vector_bytes = ops, own.spec.width * dtype.itemsize
        self._mixers = [_mixer(model, layer) for layer in own.layers]
        self._block_size, self._layer_step = memory.layout.tokens_held, memory.layout.layer_step(group)
        spec, tokens, layers = own.spec, self._block_size, range(len(own.layers))
        byte = torch_type(spec.format, dtype)
        vectors, keys = [(dtype, spec.width)], [(byte, spec.index_width)] if spec.index_width else []
        if spec.levels:
            vectors = [(dtype, spec.width - spec.levels), (byte, spec.levels)]
        if spec.format.quantized:
            (keys or vectors).append((torch.bfloat16, 1))
        # All that is cached of tokens, as words by block id, part, head and token
        self._tokens: list[Tensor] = []
        offsets, end = list[int](), 0
        for kind, width in vectors + keys:
            offsets.append(end)
            token_bytes, words = width * kind.itemsize, torch.int64
            if token_bytes % 8 or end % 8 or memory.units[group].dtype != words:
                words = torch.uint8
            self._tokens.append(memory.view(group, 0, words, (1, 1, tokens, token_bytes // words.itemsize), end))
            end += token_bytes * tokens

        def viewed(index: int, parts: list[tuple[torch.dtype, int]], first: int) -> list[Tensor]:
            """Return parts of a layer's blocks, scales without their last dimension."""
            shapes = [(kind, (tokens, width) if width > 1 else (tokens,)) for kind, width in parts]
            return [
                memory.view(group, index, kind, shape, offset)
                for (kind, shape), offset in zip(shapes, offsets[first:], strict=False)
            ]

        self.views = [_cache(viewed(index, vectors, 0)) for index in layers]
        self.index_views = [IndexCache(*viewed(index, keys, len(vectors))) if keys else None for index in layers]

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.place_T = place_T
        self.works = {mixer: self._work(mixer, rows, block_table_SC) for mixer in dict.fromkeys(self._mixers)}

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Move the latents of a tree's nodes that stay behind each other, as `PagedKV` does."""
        if verified.path_RK is None or not self.views:
            return
        for tokens in self._tokens:
            units = GroupUnits(tokens, block_table_SC, self._block_size, len(self.views), self._layer_step)
            self.ops.step_compact(verified.slots_R, verified.kv_len_R, verified.num_logits_R, verified.path_RK, units)

    def _work(self, mixer: LatentAttentionSpec, rows: DeviceRows, block_table_SC: Tensor) -> Work:
        long_R = long_rows(rows, mixer, self.ops.platform.arch)
        sparse_R = self._sparse_rows(mixer, rows, block_table_SC.shape[1], long_R)
        masked_R = sparse_R & self._masked_rows(mixer, rows, long_R)
        if mixer.indexer is not None and sparse_R.all() and not masked_R.any():
            whole = self._batch(mixer, rows, block_table_SC)
            return Work(None, None, (), Choosing(whole, None, whole, None, None))
        if self.ops.deterministic:  # a row's bits must not depend on its chunks
            long_R = np.zeros_like(long_R)
        long_R &= ~sparse_R
        if not (sparse_R | long_R).any():
            return Work(self._batch(mixer, rows, block_table_SC), None, ())
        long = tuple(expanding(rows, long_R, block_table_SC, self._block_size, self._vector_bytes))
        others, other_T = without(rows, long_R | sparse_R)
        work = Work(self._batch(mixer, others, block_table_SC) if others.num_tokens else None, other_T, long)
        if not sparse_R.any():
            return work
        return work._replace(choosing=self._choosing(mixer, rows, block_table_SC, sparse_R, masked_R))

    def _choosing(
        self,
        mixer: LatentAttentionSpec,
        rows: DeviceRows,
        block_table_SC: Tensor,
        sparse_R: np.ndarray,
        masked_R: np.ndarray,
    ) -> Choosing:
        sparse, sparse_T = without(rows, ~sparse_R)
        batch = self._batch(mixer, sparse, block_table_SC)
        if not masked_R.any():
            return Choosing(batch, sparse_T, batch, sparse_T, None)
        assert rows.kv_bound_R is not None
        gathered, gathered_T = without(rows, masked_R | ~sparse_R)
        return Choosing(
            batch,
            sparse_T,
            self._batch(mixer, gathered, block_table_SC) if gathered.num_tokens else None,
            gathered_T,
            without(sparse, masked_R[sparse_R])[1],
            tuple(expanding(rows, masked_R, block_table_SC, self._block_size, self._vector_bytes)),
            -(-int(rows.kv_bound_R[masked_R].max()) // 64),
        )

    def _sparse_rows(
        self, mixer: LatentAttentionSpec, rows: DeviceRows, columns: int, like_R: np.ndarray
    ) -> np.ndarray:
        """Return True for rows whose tokens are chosen: bool [R]. In a captured graph, whose lengths the host does not
        know, these are all rows, and so they are where bits must not depend on chunks; but none are if no context that
        the block table has columns for is longer than what is chosen."""
        if mixer.indexer is None or columns * self._block_size <= mixer.indexer.selected:
            return np.zeros_like(like_R)
        if self.ops.deterministic or rows.kv_bound_R is None or rows.num_tokens_R is None:
            return np.ones_like(like_R)
        found: np.ndarray = rows.kv_bound_R > mixer.indexer.selected
        return found

    def _masked_rows(self, mixer: LatentAttentionSpec, rows: DeviceRows, like_R: np.ndarray) -> np.ndarray:
        """Return True for rows that are cheaper with keys and values for all of their tokens, and a mask: bool [R].
        There are none where bits must not depend on chunks."""
        new_R, kv_R, index = rows.num_tokens_R, rows.kv_bound_R, mixer.indexer
        if new_R is None or kv_R is None or index is None or rows.tree is not None or self.ops.deterministic:
            return np.zeros_like(like_R)
        return worth_masking(new_R, kv_R, count=index.selected, **mixer.widths)

    def _batch(self, mixer: LatentAttentionSpec, rows: DeviceRows, block_table_SC: Tensor) -> RaggedBatch:
        shape = AttentionShape(
            num_tokens=rows.num_tokens,
            tokens_each=rows.tokens_each,
            num_heads=mixer.num_heads,
            num_kv_heads=1,
            head_bytes=self._vector_bytes,
            item_queries=ITEM_QUERIES,
            trees=rows.tree is not None,
        )
        schedule = self.ops.attention_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, shape)
        return rows.batch(block_table_SC, schedule)

    def layer(self, index: int) -> LatentLayer:
        return LatentLayer(self, self._mixers[index], self.views[index], self.index_views[index])


def _cache(parts: list[Tensor]) -> LatentCache:
    """Return a layer's cache of vectors, or of rotated parts, levels and scales."""
    if len(parts) == 1:
        return parts[0]
    rotated_NPY, latent_NPL, scale_NP = parts
    return LatentLevels(latent_NPL, rotated_NPY, scale_NP)


def _mixer(model: ModelSpec, layer: int) -> LatentAttentionSpec:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


class Choosing(NamedTuple):
    """Rows whose tokens an indexer chooses.

    batch: all of them. tokens_T: their tokens; None: all of the step's.
    gathered: those that attend to the chosen latents alone; None: none do. gathered_T: their tokens; None: all of the
        step's, and all that choose. at_T: where these are among those that choose; None: they are the same.
    masked: those that have keys and values made, and a mask of `words` words of 64 bits a token.
    """

    batch: RaggedBatch
    tokens_T: Tensor | None
    gathered: RaggedBatch | None
    gathered_T: Tensor | None
    at_T: Tensor | None
    masked: tuple[Expanding, ...] = ()
    words: int = 0


class Work(NamedTuple):
    """The ways in which a step's rows attend.

    batch: those that attend to the latents themselves; None: none do. tokens_T: their tokens; None: all of the step's,
        if there is a batch.
    long: those for which keys and values are made.
    choosing: those that attend to what an indexer chooses; None: none do.
    """

    batch: RaggedBatch | None
    tokens_T: Tensor | None
    long: tuple[Expanding, ...]
    choosing: Choosing | None = None


class LatentLayer:
    """The latents of one layer, a `layers.latent_attention.AttendsToLatents`."""

    def __init__(
        self, group: PagedLatents, mixer: LatentAttentionSpec, cache: LatentCache, index_cache: IndexCache | None
    ) -> None:
        self._group, self._mixer, self._cache, self._index_cache = group, mixer, cache, index_cache

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Return the heads' values, [T, H V]."""
        spec, work, ops = latents.spec, self._group.works[self._mixer], latents.ops
        q_THY = ops.latent_kv(
            q_THX, latent_TW, latents.weight_L, spec.norm.eps, latents.cos_sin_ZY, latents.angles(positions_T),
            spec.interleaved, self._cache, self._group.place_T,
        )  # fmt: skip
        chosen_TK = None if index is None else self._choice(index, positions_T, work, latents)
        if work.tokens_T is None and work.batch is not None:
            return self._attended(q_THX, q_THY, work.batch, latents)
        choosing = work.choosing
        if choosing is not None and choosing.gathered is not None and choosing.gathered_T is None:
            return self._attended(q_THX, q_THY, choosing.gathered, latents, chosen_TK)
        out_THV = q_THX.new_empty(len(q_THX), spec.num_heads, spec.value_dim)
        for rows in work.long:
            rows.attend(out_THV, q_THX, q_THY, self._cache, latents)
        out_TX = out_THV.flatten(1)
        parts: list[tuple[RaggedBatch | None, Tensor | None, Tensor | None]] = [(work.batch, work.tokens_T, None)]
        if choosing is not None and chosen_TK is not None:
            self._masked(out_THV, q_THX, q_THY, latents, choosing, chosen_TK)
            own_TK = chosen_TK if choosing.at_T is None else chosen_TK[choosing.at_T]
            parts.append((choosing.gathered, choosing.gathered_T, own_TK))
        for batch, at_T, chosen in parts:
            if batch is not None and at_T is not None:
                out_TX.index_copy_(0, at_T, self._attended(q_THX[at_T], q_THY[at_T], batch, latents, chosen))
        return out_TX

    def _masked(
        self,
        out_THV: Tensor,
        q_THX: Tensor,
        q_THY: Tensor,
        latents: Latents,
        choosing: Choosing,
        chosen_TK: Tensor,
    ) -> None:
        """Store what tokens of masked rows attend to."""
        if not choosing.masked:
            return
        bits_TW = latents.ops.choice_bits(chosen_TK, choosing.words)
        if choosing.tokens_T is not None:
            bits_TW = bits_TW.new_zeros(len(q_THX), choosing.words).index_copy_(0, choosing.tokens_T, bits_TW)
        for rows in choosing.masked:
            rows.attend(out_THV, q_THX, q_THY, self._cache, latents, bits_TW)

    def _choice(self, index: Index, positions_T: Tensor, work: Work, latents: Latents) -> Tensor | None:
        """Keep the indexer's keys, and return the places that it chooses for the sparse rows' tokens, int32 [T, K], or
        has chosen for an earlier layer; None without such rows."""
        spec, ops = index.spec, latents.ops
        if self._mixer.chooser is not None:
            return index.chosen_TK
        assert self._index_cache is not None
        q_TID = ops.index_keys(
            index.q_TID, index.key_TD, index.norm_2D, spec.norm.eps, latents.cos_sin_ZY,
            latents.angles(positions_T), spec.interleaved, self._index_cache, self._group.place_T,
        )  # fmt: skip
        if work.choosing is None:
            return None
        weights_TI, (batch, tokens_T, *_) = index.weights_TI, work.choosing
        if tokens_T is not None:
            q_TID, weights_TI = q_TID[tokens_T], weights_TI[tokens_T]
        index.chosen_TK = ops.index_topk(q_TID, weights_TI, self._index_cache, batch, count=spec.selected)
        return index.chosen_TK

    def _attended(
        self, q_THX: Tensor, q_THY: Tensor, batch: RaggedBatch, latents: Latents, chosen_TK: Tensor | None = None
    ) -> Tensor:
        """Attend to the latents themselves, to all or to those that are chosen: [T, H V]."""
        spec, expand, ops = latents.spec, latents.expand, latents.ops
        q_THL = expand.queries(q_THX[..., : spec.key_dim])
        if chosen_TK is None:
            return expand.values(ops.latent_attention(q_THL, q_THY, self._cache, batch, scale=spec.scale))
        assert isinstance(self._cache, Tensor)  # latents beside an indexer are no levels
        return expand.values(ops.sparse_attention(q_THL, q_THY, self._cache, batch, chosen_TK, scale=spec.scale))
