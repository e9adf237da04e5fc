"""The choice of the proposer of drafts, its networks, and the memory of their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.settings.draft_tree import LookaheadTree
from ridgeline.core.settings.speculation import NGRAM, Speculation
from ridgeline.core.specs.draft_head import DraftBlockSpec, DraftHeadSpec, HeadSpec, MedusaSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.draft_block import DraftBlock
from ridgeline.layers.draft_head import DraftHead
from ridgeline.layers.medusa import Medusa
from ridgeline.quantization.scheme import SchemeOf
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.agreed import Agreed
from ridgeline.worker.speculation.block_head import BlockHead
from ridgeline.worker.speculation.draft_model import DraftModel
from ridgeline.worker.speculation.feature_head import FeatureHead
from ridgeline.worker.speculation.layer_skip import LayerSkip
from ridgeline.worker.speculation.lookahead import Lookahead, pool_bytes
from ridgeline.worker.speculation.lookup import Lookup
from ridgeline.worker.speculation.lookup_first import LookupFirst
from ridgeline.worker.speculation.medusa_heads import MedusaHeads
from ridgeline.worker.speculation.passes import Draws
from ridgeline.worker.speculation.proposer import Proposer
from ridgeline.worker.speculation.tree_head import TreeHead
from ridgeline.worker.speculation.trees import TreeDraws
from ridgeline.worker.vocabulary import Vocabulary

Network = Decoder | DraftHead | DraftBlock | Medusa  # that drafts


@dataclass(frozen=True)
class DraftTables:
    """Texts and drafts of slots, the table of recent outputs, and the pools of lookahead decoding."""

    speculation: Speculation

    def reserve(self, sizes: StepSizes) -> Reserved:
        tree = self.speculation.tree
        each = 4 * (sizes.longest + self.speculation.num_drafts)
        if isinstance(tree, LookaheadTree):
            each += pool_bytes(tree)
        return Reserved((sizes.max_seqs + 1) * each + 8 * self.speculation.recent_places)


def network_of(
    spec: ModelSpec | HeadSpec,
    target: Decoder,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    scheme_of: SchemeOf,
    rotary_rows: int | None = None,
) -> Network:
    """Return the network that drafts, with parameters that are uninitialised. positions: the tokens that a request may
    have. scheme_of: as in `Decoder`, of a draft model's weights. rotary_rows: as in `Decoder`, the positions behind
    them included at which a network may run."""
    match spec:
        case ModelSpec():
            return Decoder(
                spec,
                ops,
                dtype=dtype,
                device=device,
                max_positions=positions,
                rotary_rows=rotary_rows,
                scheme_of=scheme_of,
            )
        case DraftHeadSpec():
            return DraftHead(spec, target, dtype=dtype, positions=positions, rotary_rows=rotary_rows)
        case DraftBlockSpec():
            return DraftBlock(spec, target, dtype=dtype, positions=positions, rotary_rows=rotary_rows)
        case MedusaSpec():
            return Medusa(spec, target, dtype=dtype)


class DraftSource(NamedTuple):
    """speculation: how drafts are made. network: the one that makes them, where the method needs one."""

    speculation: Speculation
    network: Network | None = None

    @property
    def ahead(self) -> int:
        """The positions behind a request's last token for which its table of blocks has entries."""
        return self.speculation.num_drafts + max(self.speculation.num_drafts, self.speculation.drafted_ahead)


def proposer_of(source: DraftSource, target: Decoder, slots: Slots, *, max_model_len: int, block_size: int) -> Proposer:
    """Return the proposer of the method."""
    speculation, draft = source
    ops = target.ops
    if speculation.method == NGRAM:
        return Lookup(speculation, slots, max_model_len, ops)
    network, tree = target if draft is None else draft, speculation.tree
    if isinstance(tree, LookaheadTree):
        return Lookahead(tree, slots, max_model_len)
    vocabulary = Vocabulary(target.spec.vocab_size, network.tp, ops)
    chains = Draws(speculation.num_speculative_tokens, slots, vocabulary)
    proposer: Proposer
    match draft:
        case None:
            skipped = speculation.skipped(len(target.layers))
            proposer = LayerSkip(target, skipped, chains, slots, block_size, ops)
        case Decoder():
            proposer = DraftModel(draft, chains, slots, block_size, ops)
        case DraftHead() if tree is not None:
            proposer = TreeHead(draft, TreeDraws(tree, slots, vocabulary, ops), slots, block_size, ops)
        case DraftBlock():
            proposer = BlockHead(draft, chains, slots, block_size, ops, speculation.confidence_threshold)
        case DraftHead():
            proposer = FeatureHead(draft, chains, slots, block_size, ops)
        case Medusa() if tree is not None:
            proposer = MedusaHeads(draft, TreeDraws(tree, slots, vocabulary, ops, shared=True), slots)
        case Medusa():
            proposer = MedusaHeads(draft, chains, slots)
    if target.tp.size > 1:
        proposer = Agreed(proposer, target.tp)
    if not speculation.prompt_lookup_max:
        return proposer
    return LookupFirst(Lookup(speculation, slots, max_model_len, ops), proposer, slots)
