"""Paged keys and values whose tokens ranks divide between them (`core.plan.stripes`).

Legend as in paged.py and rounds.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.layers.heads import Heads as LayerHeads
from ridgeline.parallel.ring import Ring
from ridgeline.perf.context import FORMS, Attended, cheapest
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.divided_rounds import Blocks, Heads, Keys, Queries
from ridgeline.worker.state.paged import PagedKV, PagedLayer, Scheduled
from ridgeline.worker.state.rounds import Around, Cached, Round, Together
from ridgeline.worker.state.states import DeviceRows

# The most bytes of one layer's keys and values, of all ranks, that are brought together. Beyond them queries travel.
BROUGHT_BYTES = 1 << 30
BROUGHT_COPIES = 4  # of a rank's part of them at once: what it has, sends, receives, and puts in order
LARGEST_BLOCK = 256  # tokens; the kernels take no larger ones


@dataclass(frozen=True)
class BroughtKeys:
    """The keys and values of one layer that ranks bring together."""

    def reserve(self, sizes: StepSizes) -> Reserved:
        needed = sizes.on_gpu and sizes.ranks > 1
        return Reserved(BROUGHT_COPIES * BROUGHT_BYTES // sizes.ranks if needed else 0)


def divided(rows: DeviceRows, place_T: Tensor) -> tuple[Stretches | None, Stripes | None, Tensor]:
    """Return the division of a step's tokens, and the places of those at hand among all ranks' tokens. Raise
    ContractViolation for trees."""
    if rows.tree is not None:
        raise ContractViolation("ranks that divide tokens cannot attend to trees of drafts; draft chains instead.")
    stretches = rows.share if isinstance(rows.share, Stretches) else None
    share = rows.share.stripes if isinstance(rows.share, Stretches) else rows.share
    if share is not None:
        place_T = place_T[share.mine_t]
    return stretches, share, place_T


class ContextKV(PagedKV):
    """A `GroupState` that writes the keys and values of this rank's tokens, then attends to those of all ranks.

    forms: those of `perf.context.FORMS` that may be used.
    """

    stretches: Stretches | None

    def __init__(
        self,
        memory: StateMemory,
        group: int,
        model: ModelSpec,
        dtype: torch.dtype,
        ops: Ops,
        ring: Ring,
        forms: tuple[str, ...] = FORMS,
    ) -> None:
        super().__init__(memory, group, model, dtype, ops)
        self._ring, self._forms = ring, forms
        self.rounds: dict[Scheduled, Round] = {}

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        """Prepare for the next step. A place is that of the token among all ranks' tokens; the N-th part of it is its
        place among its rank's."""
        self.stretches, share, place_T = divided(rows, place_T)
        ring, blocks = self._ring, None
        if share is not None:
            slots_R = rows.slots_R[: len(share.end_R)]
            blocks = Blocks(share, slots_R, block_table_SC, self.views[0][0].shape[2], self._spec.window)
        self.place_T = torch.where(place_T % ring.size == ring.rank, place_T // ring.size, 0)
        for way in dict.fromkeys(self._ways):
            self.rounds[way] = self._round(way, rows, share, blocks, block_table_SC)

    def _round(
        self, way: Scheduled, rows: DeviceRows, share: Stripes | None, blocks: Blocks | None, table_SC: Tensor
    ) -> Round:
        spec = self._spec
        plain = not (way.capped or way.alibi)
        around = Around(self._ring, self.ops, way.num_heads, spec.window, self.views[0][0], plain)
        if share is None or blocks is None:
            return Together(around, rows, table_SC)
        match self.form(way, share, blocks):
            case "heads":
                return Heads(around, share, blocks)
            case "keys":
                return Keys(around, share, blocks)
            case _:
                return Queries(around, share, rows, table_SC)

    def form(self, way: Scheduled, share: Stripes, blocks: Blocks) -> str:
        """Return the form in which the step's ranks attend together. All of them come to the same, from the same
        lengths."""
        ranks = share.ranks
        _, kv_heads, held_tokens, head_dim = self.views[0][0].shape
        keys = len(blocks.id_B) * held_tokens * ranks
        item, device = self._dtype.itemsize, self.ops.platform.device_type
        layer = Attended(len(share.order_T), keys, share.pairs, way.num_heads, kv_heads, head_dim, item)
        possible = set(self._forms)
        if 2 * keys * prod((kv_heads, head_dim)) * item > BROUGHT_BYTES:
            possible = {"queries"}
        block = held_tokens * ranks
        if block > LARGEST_BLOCK or block & (block - 1):
            possible -= {"heads"}
        return cheapest(ranks, layer, device, possible or {"queries"})

    def layer(self, index: int) -> ContextLayer:
        return ContextLayer(self, self._ways[index], *self.views[index], None)


class ContextLayer(PagedLayer):
    """The keys and values of one layer, a `layers.attention.Attends`."""

    _group: ContextKV

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: LayerHeads, room: Rounded | None = None) -> Tensor:
        """Return the attended heads of the tokens that this rank runs, [T, H * D]. They are not rounded: merging parts
        comes last."""
        group, spec, stretches = self._group, heads.spec, self._group.stretches
        if stretches is not None:
            qkv_TX, positions_T = stretches.to_stripes(qkv_TX), stretches.striped_positions_t
        projected = Projected(
            qkv_TX, heads.q_norm_D, heads.k_norm_D, heads.eps, heads.cos_sin_ZY, positions_T, self._k, self._v,
            group.place_T, spec.num_heads, spec.num_kv_heads, spec.v_norm,
        )  # fmt: skip
        q_THD = group.ops.rope_kv(projected)
        out_TX = group.rounds[self._way].attend(q_THD, positions_T, Cached(self._k, self._v), heads.softmax).flatten(1)
        return out_TX if stretches is None else stretches.from_stripes(out_TX)
