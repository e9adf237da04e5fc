"""The choice of who makes the drafts."""

from __future__ import annotations

from ridgeline.core.speculation import Speculation
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.draft_head import DraftHead
from ridgeline.layers.medusa import Medusa
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.draft_model import DraftModel
from ridgeline.worker.speculation.feature_head import FeatureHead
from ridgeline.worker.speculation.lookup import Lookup
from ridgeline.worker.speculation.medusa_heads import MedusaHeads
from ridgeline.worker.speculation.proposer import Proposer

Network = Decoder | DraftHead | Medusa  # that drafts


def proposer_of(
    speculation: Speculation, slots: Slots, ops: Ops, *, max_model_len: int, block_size: int, draft: Network | None
) -> Proposer:
    """Return the proposer of the method. draft: the network that drafts, where the method needs one."""
    drafts = speculation.num_speculative_tokens
    match draft:
        case None:
            return Lookup(speculation, slots, max_model_len, ops)
        case Decoder():
            return DraftModel(draft, drafts, slots, block_size, ops)
        case DraftHead():
            return FeatureHead(draft, drafts, slots, block_size, ops)
        case Medusa():
            return MedusaHeads(draft, drafts, slots, ops)
