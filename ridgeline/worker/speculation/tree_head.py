"""Trees of drafts by a head that goes on from the target's hidden states.

The first pass behind a step runs the pairs of the tokens that a row emitted, as where drafts are chains. Each further
pass runs the pairs of the nodes of a depth that are expanded: the head's own output behind the node's parent, and the
node's token. Their keys lie behind the pair of the last token, which is node 0 of the tree that these passes see. All
of them are overwritten by the pairs of the next step, so none has to move.

Legend:
    R  rows
    S  slots
    M  model width
    E  nodes of a depth that are expanded
    X  nodes that are expanded, at most
    N  the same and node 0: X + 1
    K  tokens that a row emits, at most
    V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.draft_head import DraftHead
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.feature_head import FeatureHead
from ridgeline.worker.speculation.passes import Nodes, StatesBehind
from ridgeline.worker.speculation.proposer import Taken
from ridgeline.worker.speculation.trees import Expanded, TreeDraws
from ridgeline.worker.state.states import States


class TreeHead(FeatureHead):
    """A `FeatureHead` that drafts trees."""

    def __init__(self, head: DraftHead, draws: TreeDraws, slots: Slots, block_size: int, ops: Ops) -> None:
        super().__init__(head, draws, slots, block_size, ops)
        self._trees, count, expanded = draws, len(slots.kv_len_S), max(1, draws.tree.expanded)
        self._token_SX = torch.zeros(count, expanded, dtype=torch.int32, device=slots.device)
        self._sight_SN = torch.ones(count, 1 + expanded, dtype=torch.int64, device=slots.device)
        self._base_S = torch.zeros_like(slots.kv_len_S)

    def _draft(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken,
        feature_RM: Tensor,
    ) -> None:
        rows, behind = slots_R.long(), StatesBehind(states, len(self.layers))
        base_R = self._slots.kv_len_S[rows] - 1
        self._base_S[rows] = base_R
        found_REM, sight_RE, first = feature_RM[:, None], torch.ones_like(base_R)[:, None], 0

        def scores(expanded: Expanded) -> Tensor:
            nonlocal found_REM, sight_RE, first
            nodes = expanded.token_RE.shape[1]
            if expanded.depth == 0 and taken.catching is Catching.BEHIND:
                hidden = self._first_pass(out_token_RK, slots_R, states, expanded.runs_R, taken)
            elif expanded.depth == 0:
                inputs = self.passes.begin(expanded.token_RE, slots_R, states, base_R, expanded.runs_R)
                own_RM = self.head.features(feature_RM)
                hidden = self.head(inputs.token_ids_T, own_RM, inputs.positions_T, behind)
            else:
                width = found_REM.shape[2]
                feature_REM = found_REM.gather(1, expanded.parent_RE[..., None].expand(-1, -1, width))
                own_E = 1 << torch.arange(first, first + nodes, device=rows.device)
                sight_RE = sight_RE.gather(1, expanded.parent_RE) | own_E
                self._token_SX[rows, first - 1 : first - 1 + nodes] = expanded.token_RE.int()
                self._sight_SN[rows, first : first + nodes] = sight_RE
                run = Nodes(self._token_SX, self._sight_SN, self._base_S, base_R + first)
                inputs = self.passes.begin_nodes(run, nodes, slots_R, states, expanded.runs_R)
                hidden = self.head(inputs.token_ids_T, feature_REM.flatten(0, 1), inputs.positions_T, behind)
            first += nodes
            logits_QV, found_QM = self.head.found(hidden)
            found_REM = found_QM.unflatten(0, (-1, nodes))
            return logits_QV.unflatten(0, (-1, nodes))

        self._trees.draw(out_token_RK, slots_R, features, wanted, scores)
