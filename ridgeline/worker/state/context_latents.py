"""Paged latents whose tokens ranks divide between them (`core.plan.stripes`).

Where keys and values of the step's rows are cheaper, each rank makes those of some heads, of all ranks' vectors, and
has all tokens' queries of these heads (Ulysses, arXiv 2309.14509). Otherwise a rank attends with queries against
latents to the vectors at hand, and the heads' values of such parts are added up: merging multiplies whole heads, so it
may come behind their projection, which has fewer numbers to send. In a divided step either the vectors go around, which
all heads share, or the queries (divided_rounds.py).

Legend as in latent.py and rounds.py, and
    K  width of a query's part that is not rotated
    Y  width of the rotated part
    J  cached tokens of the step's rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.expanded.cost import fewer_flops
from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.latent.op import ITEM_QUERIES
from ridgeline.kernels.attention.paged.op import AttentionShape, Schedule, Softmax
from ridgeline.kernels.ops import Ops
from ridgeline.layers.indexer import Index
from ridgeline.layers.latent_attention import Latents
from ridgeline.parallel.ring import Ring
from ridgeline.perf.context import Attended, cheapest
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.context import BROUGHT_BYTES, BROUGHT_COPIES, divided
from ridgeline.worker.state.divided_rounds import Blocks, Keys, Queries
from ridgeline.worker.state.expanding import attend_expanded
from ridgeline.worker.state.latent import LatentLayer, PagedLatents
from ridgeline.worker.state.rounds import Around, Piece, Round, Rows, Together
from ridgeline.worker.state.states import DeviceRows
from ridgeline.worker.upload import upload


class CachedLatents(NamedTuple):
    """One layer's vectors on this rank, [blocks, P, W], and what makes values of what was attended to."""

    kept_NPW: Tensor
    latents: Latents

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.kept_NPW,)

    def of(self, parts: Tensor) -> CachedLatents:
        return self._replace(kept_NPW=parts[0])


@dataclass(frozen=True)
class AroundLatents(Around):
    """The things that rounds of layers of latent attention are made of. Queries are [T, H, W]: those against latents,
    and their rotated parts behind them.

    rank: the width of latents.
    """

    rank: int = 0

    def part(
        self, q_THD: Tensor, positions_T: Tensor, holder: int, cached: CachedLatents, piece: Piece, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Return the values of what is attended to of one rank's vectors, [T, H, V], and the logarithms of its sums."""
        split = q_THD[..., : self.rank], q_THD[..., self.rank :]
        out_THL, lse_TH = self.ops.partial_latent_attention(*split, cached.kept_NPW, piece.batch, scale=softmax.scale)
        return cached.latents.expand.values(out_THL).unflatten(1, (self.num_heads, -1)), lse_TH

    def schedule(self, rows: Rows, num_tokens: int, each: int = 0, *, ranks: int = 1) -> Schedule | None:
        width = self.cache_NGPD.shape[-1] * self.cache_NGPD.element_size()
        of_layers = AttentionShape(
            num_tokens=num_tokens, tokens_each=each, num_heads=self.num_heads, num_kv_heads=1, head_bytes=width,
            item_queries=ITEM_QUERIES,
        )  # fmt: skip
        return self.ops.attention_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, of_layers)


class ExpandedHeads:
    """The round in which every rank makes keys and values of some heads, for the step's rows alone."""

    def __init__(self, ring: Ring, share: Stripes, blocks: Blocks, mixer: LatentAttentionSpec, held: int) -> None:
        self._ring, self._blocks, self._mixer = ring, blocks, mixer
        self._counts, device = share.count_N.tolist(), blocks.id_B.device
        self._order_T, self._back_T = (upload(x, device) for x in (share.order_T, np.argsort(share.order_T)))
        size, has_R = held * ring.size, share.num_tokens_R > 0
        bound_R = -(-share.end_R // size) * size
        tokens_R = share.num_tokens_R
        self._rows = LongRows(
            first_R=(np.cumsum(tokens_R) - tokens_R)[has_R],
            tokens_R=tokens_R[has_R],
            begin_R=(np.cumsum(bound_R) - bound_R)[has_R],
            bound_R=bound_R[has_R],
            kv_len_R=upload(share.end_R[has_R].astype(np.int32), device),
        )

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: CachedLatents, softmax: Softmax) -> Tensor:
        """Return the values of the heads: [T, H, V]. q_THD: queries as projected, with their rotated parts behind."""
        ring, spec, (tokens, heads, width) = self._ring, self._mixer, q_THD.shape
        some = heads // ring.size
        asked = ring.exchanged(q_THD.split(some, 1), [(count, some, width) for count in self._counts])
        queries = torch.cat(asked)[self._back_T].split((spec.key_dim, spec.rope_dim), -1)
        kept_NBPW = ring.stacked(self._blocks.taken(cached)[0])
        vectors = kept_NBPW.permute(1, 2, 0, 3).reshape(-1, spec.width).split((spec.rank, spec.rope_dim), 1)
        out_THV = q_THD.new_empty(len(self._order_T), some, spec.value_dim)
        attend_expanded(out_THV, queries, vectors, self._rows, cached.latents, first_head=ring.rank * some)
        answers = out_THV[self._order_T].split(self._counts)
        return torch.cat(ring.exchanged(answers, [(tokens, some, spec.value_dim)] * ring.size), 1)


class ContextLatents(PagedLatents):
    """A `GroupState` that writes the latents of this rank's tokens, then attends to those of all ranks."""

    stretches: Stretches | None

    def __init__(
        self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops, ring: Ring
    ) -> None:
        super().__init__(memory, group, model, dtype, ops)
        self._ring, self._dtype = ring, dtype
        self.rounds: dict[LatentAttentionSpec, Round] = {}

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        """Prepare for the next step. A place is that of the token among all ranks' tokens; the N-th part of it is its
        place among its rank's."""
        self.stretches, share, place_T = divided(rows, place_T)
        ring, blocks = self._ring, None
        if share is not None:
            blocks = Blocks(share, rows.slots_R[: len(share.end_R)], block_table_SC, self._block_size, None)
        self.place_T = torch.where(place_T % ring.size == ring.rank, place_T // ring.size, 0)
        for mixer in dict.fromkeys(self._mixers):
            self.rounds[mixer] = self._round(mixer, rows, share, blocks, block_table_SC)

    def _round(
        self,
        mixer: LatentAttentionSpec,
        rows: DeviceRows,
        share: Stripes | None,
        blocks: Blocks | None,
        table_SC: Tensor,
    ) -> Round:
        view_NPW = self.views[0]
        assert isinstance(view_NPW, Tensor)  # levels do not travel
        around = AroundLatents(self._ring, self.ops, mixer.num_heads, None, view_NPW, rank=mixer.rank)
        if share is None or blocks is None:
            return Together(around, rows, table_SC)
        match self.form(mixer, share, blocks):
            case "heads":
                return ExpandedHeads(self._ring, share, blocks, mixer, self._block_size)
            case "keys":
                return Keys(around, share, blocks)
            case _:
                return Queries(around, share, rows, table_SC)

    def form(self, mixer: LatentAttentionSpec, share: Stripes, blocks: Blocks) -> str:
        """Return "heads", or "keys" or "queries" for what goes around. All ranks come to the same, from the same
        lengths."""
        keys, ranks = len(blocks.id_B) * self._block_size * share.ranks, share.ranks
        item = self._dtype.itemsize
        brought = keys * mixer.width * item
        if brought > BROUGHT_BYTES:
            return "queries"
        sizes = {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim, "rank": mixer.rank}
        tokens, seen = len(share.order_T), int(share.end_R[share.num_tokens_R > 0].sum())
        # All vectors as they were received and as they are ordered, and a rank's own: as much as is reserved
        fits = brought * (2 + 1 / ranks) <= BROUGHT_COPIES * BROUGHT_BYTES / ranks
        if mixer.num_heads % ranks == 0 and fits and fewer_flops(share.pairs, seen - tokens, **sizes):
            return "heads"
        # One vector a key, where others have a key and a value
        layer = Attended(len(share.order_T), -(-keys // 2), share.pairs, mixer.num_heads, 1, mixer.width, item)
        return cheapest(ranks, layer, self.ops.platform.device_type, {"keys", "queries"})

    def layer(self, index: int) -> ContextLatentLayer:
        return ContextLatentLayer(self, self._mixers[index], self.views[index], None)


class ContextLatentLayer(LatentLayer):
    """The latents of one layer, a `layers.latent_attention.AttendsToLatents`."""

    _group: ContextLatents

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Return the heads' values of the tokens that this rank runs, [T, H V]."""
        group, spec, stretches = self._group, latents.spec, self._group.stretches
        if stretches is not None:
            q_TX, latent_TW = stretches.to_stripes(torch.cat((q_THX.flatten(1), latent_TW), 1)).split(
                (spec.query_size, spec.width), 1
            )
            q_THX, positions_T = q_TX.unflatten(1, (spec.num_heads, -1)), stretches.striped_positions_t
        q_THY = latents.ops.latent_kv(
            q_THX, latent_TW, latents.weight_L, spec.norm.eps, latents.cos_sin_ZY, latents.angles(positions_T),
            spec.interleaved, self._cache, group.place_T,
        )  # fmt: skip
        assert isinstance(self._cache, Tensor)
        cached, round_ = CachedLatents(self._cache, latents), group.rounds[self._mixer]
        q_THK = q_THX[..., : spec.key_dim]
        if not isinstance(round_, ExpandedHeads):
            q_THK = latents.expand.queries(q_THK)
        q_THD = torch.cat((q_THK, q_THY), -1)
        out_TX = round_.attend(q_THD, positions_T, cached, Softmax(spec.scale)).flatten(1)
        return out_TX if stretches is None else stretches.from_stripes(out_TX)
