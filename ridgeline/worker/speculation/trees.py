"""Trees of drafts, drawn into tables by slot.

Several tokens are drafted behind a node: the one that is drawn there (`Draws`), and those that would be drawn in its
place. The noise of a draw depends on the request and on the position alone. So the nodes of a depth share theirs, as
their draws by the target will. A token counts for as likely as it is with this noise.

Nothing here is read by the host. A tree is data: captured graphs know how many nodes there are, and no more.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    N  nodes of a slot: D + 1
    E  nodes of a depth that are expanded
    C  tokens that may be drafted behind an expanded node
    L  drafts of a depth
    X  all drafts that were found
    V  vocabulary
    Q  rows and their expanded nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.core.settings.draft_tree import DraftTree, Level, StaticTree
from ridgeline.kernels.ops import Ops
from ridgeline.worker.slots import Slots
from ridgeline.worker.vocabulary import Vocabulary


class Expanded(NamedTuple):
    """The nodes that are expanded next.

    depth: that of the nodes; 0: they are the rows' last tokens.
    token_RE: their tokens. parent_RE: which of the nodes expanded before each of them follows.
    runs_R: the rows for which it matters what follows.
    """

    depth: int
    token_RE: Tensor
    parent_RE: Tensor
    runs_R: Tensor


Scores = Callable[[Expanded], Tensor]  # → [R, E, V], what may follow each node; [R, 1, V] if it is the same for all


class Form(Protocol):
    """A choice of the drafts that are expanded and of those that are verified, made anew for each step."""

    def choose(self, noised_REV: Tensor, fits_R: Tensor) -> tuple[Tensor, Tensor]:
        """Take drafts from what may follow the nodes of a depth (`kernels/sampling/noised.py`), in rows that have room
        for them. Return tokens and parents of those that are expanded next."""

    def tree(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the drafts, the bits of all nodes unless these never change, and the depths of the drafts: [R, D],
        [R, N], and [R, D] or [D]."""


class TreeDraws:
    """Draws trees of drafts.

    drafts_SD: int32, the tokens of each slot's tree. tree_SN: int64, its bits (kernels/base/tree.py).
    shared: the scores of a depth do not depend on the nodes before.
    """

    def __init__(
        self, tree: DraftTree, slots: Slots, vocabulary: Vocabulary, ops: Ops, *, shared: bool = False
    ) -> None:
        self.tree, self._slots, self._vocabulary, self._ops = tree, slots, vocabulary, ops
        count, device = slots.dummy + 1, slots.device
        self.depth = tree.depth
        self.drafts_SD = torch.full((count, tree.nodes), -1, dtype=torch.int32, device=device)
        flat = [1, *(1 | 1 << node for node in range(1, 1 + tree.nodes))]
        bits_N = words_of(tree.bits if isinstance(tree, StaticTree) else flat).to(device)
        self.tree_SN = bits_N.repeat(count, 1)
        self._static = Indices.of(tree, device, shared=shared) if isinstance(tree, StaticTree) else None

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def draw(self, out_token_RK: Tensor, slots_R: Tensor, features: Feature, wanted: int, scores: Scores) -> None:
        """Draft what follows the slots' last tokens: the whole tree if any drafts are wanted, but nothing behind the
        last token that a request may emit. Rows that emitted nothing, or whose slot has stopped, get none.

        scores: gives the scores of what may follow nodes. Before the first drafts it matters for all rows that emitted
            a token, since the keys of those that have stopped may be found by others. Where ranks divide the
            vocabulary, they are for this rank's part.
        """
        slots, rows = self._slots, slots_R.long()
        self.drafts_SD.index_fill_(0, rows, -1)  # a number on the host could not be captured
        if wanted == 0:
            return
        kv_len_R = slots.kv_len_S[rows]
        runs_R = out_token_RK[:, 0] >= 0
        goes_R = runs_R & (slots.stopped_S[rows] == 0)
        room_R = slots.max_len_S[rows] - kv_len_R - 2
        form: Form = Dynamic(self.tree) if self._static is None else Static(self._static)
        token_RE = slots.last_token_S[rows][:, None]
        expanded = Expanded(0, token_RE, torch.zeros_like(token_RE), runs_R)
        for depth in range(1, 1 + self.tree.depth):
            logits_REV = scores(expanded)
            nodes = logits_REV.shape[1]
            slots_Q, known_Q = (each[:, None].expand(-1, nodes).flatten() for each in (slots_R, kv_len_R + depth))
            logits_QV = self._vocabulary.whole(logits_REV.flatten(0, 1))
            noised_QV = self._noised(logits_QV, slots_Q, known_Q, features)
            found = form.choose(noised_QV.unflatten(0, (-1, nodes)), room_R >= depth)
            expanded = Expanded(depth, found[0].clamp(min=0), found[1], goes_R & (room_R > depth))
        draft_RD, bits_RN, depth_RD = form.tree()
        fits_RD = goes_R[:, None] & (room_R[:, None] >= depth_RD)
        self.drafts_SD[rows] = torch.where(fits_RD, draft_RD, -1).int()
        if bits_RN is not None:
            self.tree_SN[rows] = bits_RN

    def _noised(self, logits_QV: Tensor, slots_Q: Tensor, known_Q: Tensor, features: Feature) -> Tensor:
        """Return the scores with the noise of the draws. Where filters may make a draw another one than the largest of
        these, it becomes the largest."""
        tables = self._slots.sampling
        noised_QV = self._ops.noised(logits_QV, tables, slots_Q, known_Q, features)
        if features & Feature.FILTER:
            drawn_Q1 = self._ops.sample(logits_QV, tables, slots_Q, known_Q, features).clamp(min=0)[:, None]
            noised_QV = noised_QV.scatter(1, drawn_Q1, noised_QV.amax(1, keepdim=True) + 1)
        return noised_QV


class Indices(NamedTuple):
    """A static tree, on the device.

    levels: of each depth, width: so many tokens are looked at behind each of the nodes before; drafts_L: where its
        drafts stand among these; expanded_E: which drafts are expanded; parent_E: which of the nodes before those
        follow.
    """

    levels: list[tuple[int, Tensor, Tensor, Tensor]]
    depth_D: Tensor

    @staticmethod
    def of(tree: StaticTree, device: torch.device, *, shared: bool) -> Indices:
        def made(level: Level) -> tuple[int, Tensor, Tensor, Tensor]:
            parents, ranks = np.array(level.parents), np.array(level.ranks)
            expanded, width = np.array(level.expanded, np.int64), level.width
            drafts = ranks if shared else parents * width + ranks
            on_device = (torch.from_numpy(each).to(device) for each in (drafts, expanded, parents[expanded]))
            return width, *on_device  # type: ignore[return-value]

        depths = torch.tensor([len(path) for path in tree.paths], device=device)
        return Indices([made(level) for level in tree.levels], depths)


class Static:
    """A `Form` that is the same for all rows."""

    def __init__(self, indices: Indices) -> None:
        self._indices, self._found = indices, list[Tensor]()

    def choose(self, noised_REV: Tensor, fits_R: Tensor) -> tuple[Tensor, Tensor]:
        """Take the drafts of a depth, and return those that are expanded."""
        width, drafts_L, expanded_E, parent_E = self._indices.levels[len(self._found)]
        token_RL = noised_REV.topk(width).indices.flatten(1)[:, drafts_L]
        self._found.append(token_RL)
        return token_RL[:, expanded_E], parent_E.expand(len(token_RL), -1)

    def tree(self) -> tuple[Tensor, None, Tensor]:
        """Return the drafts in the order of the nodes."""
        return torch.cat(self._found, 1), None, self._indices.depth_D


class Dynamic:
    """A `Form` by the products of probabilities (EAGLE-2: Li et al., arXiv 2406.16858, sections 4.1 and 4.2).

    A node is never more promising than its parent, and of equal ones the first counts. So the parent of
    a chosen node is chosen too.
    """

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree
        self._tokens, self._values, self._parents, self._depths = (list[Tensor]() for _ in range(4))
        self._expanded_RE: Tensor | None = None  # among all drafts

    def choose(self, noised_REV: Tensor, fits_R: Tensor) -> tuple[Tensor, Tensor]:
        """Take the likeliest that may follow as candidates, and return the most promising."""
        width, device = self._tree.width, noised_REV.device
        logit_REC, token_REC = noised_REV.topk(width)
        value_REC = (logit_REC - noised_REV.logsumexp(-1, keepdim=True)).nan_to_num(nan=-torch.inf)
        value_REC = value_REC.masked_fill(~fits_R[:, None, None], -torch.inf)
        before = sum(each.shape[1] for each in self._tokens)
        if self._expanded_RE is None:
            parent_REC = torch.full_like(token_REC, -1)
        else:
            parent_REC = self._expanded_RE[..., None].expand_as(token_REC)
            value_REC = value_REC + torch.cat(self._values, 1).gather(1, self._expanded_RE)[..., None]
        for kept, each_REC in ((self._tokens, token_REC), (self._values, value_REC), (self._parents, parent_REC)):
            kept.append(each_REC.flatten(1))
        self._depths.append(torch.full((self._tokens[-1].shape[1],), len(self._tokens), device=device))
        pick_RE = self._values[-1].sort(dim=1, descending=True, stable=True).indices[:, :width]
        self._expanded_RE = before + pick_RE
        return token_REC.flatten(1).gather(1, pick_RE), pick_RE // width

    def tree(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most promising of all candidates."""
        value_RX = torch.cat(self._values, 1)
        best_RX = value_RX.sort(dim=1, descending=True, stable=True).indices
        chosen_RD = best_RX[:, : self._tree.nodes].sort(dim=1).values
        above_RD = torch.cat(self._parents, 1).gather(1, chosen_RD)
        is_parent_RDD = above_RD[:, :, None] == chosen_RD[:, None, :]
        node_RD = torch.where(is_parent_RDD.any(2), 1 + is_parent_RDD.int().argmax(2), 0)  # of the parents
        own_D = 1 << torch.arange(1, 1 + self._tree.nodes, device=value_RX.device)
        root_R1 = torch.ones_like(chosen_RD[:, :1])
        bits_RN = torch.cat((root_R1, (own_D | 1).expand_as(chosen_RD)), 1)
        for _ in range(self._tree.depth - 1):
            bits_RN = torch.cat((root_R1, own_D | bits_RN.gather(1, node_RD)), 1)
        return torch.cat(self._tokens, 1).gather(1, chosen_RD), bits_RN, torch.cat(self._depths)[chosen_RD]


def words_of(bits: Sequence[int]) -> Tensor:
    """Return 64 bits each as int64, the last of them as its sign."""
    return torch.from_numpy(np.array(bits, np.uint64).view(np.int64))
