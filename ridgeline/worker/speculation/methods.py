"""The choice of who makes the drafts."""

from __future__ import annotations

from ridgeline.core.speculation import DRAFT_MODEL, Speculation
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.draft_model import DraftModel
from ridgeline.worker.speculation.lookup import Lookup
from ridgeline.worker.speculation.proposer import Proposer


def proposer_of(
    speculation: Speculation, slots: Slots, ops: Ops, *, max_model_len: int, block_size: int, draft: Decoder | None
) -> Proposer:
    """Return the proposer of the method. draft: the network of the draft model, where the method needs one."""
    if speculation.method == DRAFT_MODEL:
        assert draft is not None
        return DraftModel(draft, speculation.num_speculative_tokens, slots, block_size, ops)
    return Lookup(speculation, slots, max_model_len, ops)
