"""Device memory and rules behind `CacheSpec`: paged keys and values.

One buffer, seen by every layer as an ordinary paged cache [blocks, kv heads, block size, head dim] (the picture is in
`core.cache_spec`). Legend: N blocks, G kv heads, P tokens per block, D head dim, T tokens of the step, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ridgeline.core.cache_spec import CacheLayout
from ridgeline.core.plan import CopyBlocks
from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.kernels.ops import Ops
from ridgeline.layers.attention import Attention
from ridgeline.worker.upload import staging

COPIED_AT_ONCE = 32 << 20  # bytes: what is read lies beside the cache until it is written


class PagedCache:
    """The memory. What a row does not see may hold anything, NaN included, and never shows in its output: every
    implementation of the attention ops keeps to that (`kernels.attention.op.RaggedBatch`). So blocks are handed from
    one request to the next as they are, and nothing need be zeroed; it is, once, so that equal runs have equal memory.

    A GPU reads a block head by head, so a head's tokens lie together there. A CPU copies whole blocks beside each other
    before it attends: with a token's heads together, that gives the keys of all heads without a transposition.
    """

    def __init__(self, layout: CacheLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        spec = layout.groups[0].spec
        units = layout.units_per_page * layout.num_pages
        if device.type == "cpu":
            tokens_first = (units, 2, layout.block_size, spec.num_kv_heads, spec.head_dim)
            self._memory = torch.zeros(tokens_first, dtype=dtype)
            self._units = self._memory.transpose(2, 3)
        else:
            heads_first = (units, 2, spec.num_kv_heads, layout.block_size, spec.head_dim)
            self._units = self._memory = torch.zeros(heads_first, dtype=dtype, device=device)

    def views(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer → its keys and its values, each [N, G, P, D], indexed by the ids in its group's block table."""
        views = {}
        for group in self.layout.groups:
            for index, layer in enumerate(group.layers):
                units = self._units[index * self.layout.num_pages :]
                views[layer] = units[:, 0], units[:, 1]
        return views

    def copy(self, copies: Sequence[CopyBlocks]) -> None:
        """Blocks onto others, in every layer of their group."""
        num_pages, layers = self.layout.num_pages, [len(group.layers) for group in self.layout.groups]
        places = [
            [block + layer * num_pages for copy in copies for layer in range(layers[copy.group]) for block in ids(copy)]
            for ids in (attrgetter("sources"), attrgetter("targets"))
        ]
        staged = staging(2 * len(places[0]), self._memory.device)
        staged.numpy()[:] = [*places[0], *places[1]]
        places_2N = staged.to(self._memory.device, non_blocking=True).long().view(2, -1)
        for sources_N, targets_N in places_2N.split(max(1, COPIED_AT_ONCE // self.layout.unit_bytes), dim=1):
            self._memory.index_copy_(0, targets_N, self._memory.index_select(0, sources_N))


class PagedState:
    """`MixerState` of one step: writes the step's keys and values, then attends to all that is cached."""

    def __init__(self, cache: PagedCache, ops: Ops) -> None:
        self.copy = cache.copy
        self._views = cache.views()
        self._group_of = {layer: g for g, group in enumerate(cache.layout.groups) for layer in group.layers}
        self._ops = ops
        self._batches: Sequence[RaggedBatch] = ()
        self._places: Sequence[Tensor] = ()

    def keys(self, layer: int) -> Tensor:
        """A layer's keys: [N, G, P, D]."""
        return self._views[layer][0]

    def begin(self, batches: Sequence[RaggedBatch], places: Sequence[Tensor]) -> None:
        """The step to come: per cache group, the ragged batch and the place of each token (int64 [T])."""
        self._batches, self._places = batches, places

    def attend(self, mixer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        spec, group = mixer.spec, self._group_of[mixer.layer]
        k_cache, v_cache = self._views[mixer.layer]
        batch, ops = self._batches[group], self._ops
        projected = (
            qkv_TX,
            *mixer.head_norms,
            mixer.rotary.cos_sin_PR if mixer.rotary is not None else None,
            positions_T,
            k_cache,
            v_cache,
            self._places[group],
            spec.num_heads,
            spec.num_kv_heads,
        )
        scale, window, softcap, slopes_H = spec.scale, spec.window, spec.softcap, mixer.slopes_H
        if len(qkv_TX) == len(batch.slots_R):  # every row has one token
            out_THD = ops.decode_attention(
                *projected, batch, scale=scale, window=window, softcap=softcap, slopes_H=slopes_H
            )
        else:
            q_THD = ops.rope_kv(*projected)
            out_THD = ops.paged_attention(
                q_THD, k_cache, v_cache, batch, scale=scale, window=window, softcap=softcap, slopes_H=slopes_H
            )
        return out_THD.flatten(1)
