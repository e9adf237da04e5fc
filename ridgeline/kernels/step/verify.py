"""Drafts against what was drawn in their places: the tokens that rows emit, in chains of drafts and in trees.

Legend:
    R  rows
    S  slots
    N  nodes of a row: its last token and its drafts, at most
    K  tokens that a row may emit, at most
    P  positions at which tokens were drawn
    D  drafts of a slot, at most
    E  stop ids of a slot
    V  vocabulary
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.base.rows import Finish
from ridgeline.kernels.base.tree import parent, popcount
from ridgeline.kernels.step.op import SlotAdvance


class DraftNodes(NamedTuple):
    """The drafts that rows verify.

    places_RN: int32, which of the drawn tokens was drawn at a row's node n.
    num_logits_R: int32, how many of these nodes a row has; 0: it emits nothing.
    drafts_SD: int32, the drafts of each slot, of which d is node d + 1; -1 where there is none. D is at least N - 1.
    tree_SN: int64, the bits of each slot's nodes (kernels/base/tree.py), of which no node has K others above it. None:
        every node is the child of the one before, and K is N.
    """

    places_RN: Tensor
    num_logits_R: Tensor
    drafts_SD: Tensor
    tree_SN: Tensor | None = None


class EmittedTokens(NamedTuple):
    """Memory for what rows emit.

    token_RK: int32, the emitted tokens, then -1.
    finish_R: int8, as of `step_advance`, of the last token that was emitted, or of the one that could not be drawn.
    drafted_R: int8, how many drafts the row verified.
    path_RK: int32, the nodes at which the emitted tokens were drawn, then -1. None: not asked for.
    """

    token_RK: Tensor
    finish_R: Tensor
    drafted_R: Tensor
    path_RK: Tensor | None = None


def step_verify(token_P: Tensor, nodes: DraftNodes, advance: SlotAdvance, emitted: EmittedTokens) -> None:
    """Take what rows that verify drafts emit into the slots, and find the rows that have finished; in place.

    A row's tokens were drawn behind its last token, which is node 0, and behind each of its drafts. It emits the token
    drawn at node 0. If a child of the node is equal to the token drawn there, the row goes on there and emits the token
    drawn at the child, until no child is equal, or the row has finished. Of equal children the first one counts. With
    one token each this is `step_advance`.

    token_P: int64, the tokens drawn; -1 where none could be drawn.
    """
    places_RN, num_logits_R, drafts_SD, tree_SN = nodes
    slots_R, kv_len_R, active_R, stop_ids_SE, max_len_S, kv_len_S, last_token_S, stopped_S, output_count_SV = advance
    columns, count = emitted.token_RK.shape[1], places_RN.shape[1]
    node_N = torch.arange(count, device=token_P.device)
    own_N, slots_R, num_logits_R = 1 << node_N, slots_R.long(), num_logits_R.long()
    bits_RN = 2 * own_N[None] - 1 if tree_SN is None else tree_SN[slots_R][:, :count]
    depth_RN, token_RN = popcount(bits_RN) - 1, token_P.long()[places_RN.long()]
    above_RN = parent(bits_RN).clamp(min=0).expand_as(token_RN)
    known_RN = (node_N < num_logits_R[:, None]) & active_R[:, None] & (depth_RN < columns)
    draft_RN = torch.full_like(token_RN, -1)
    draft_RN[:, 1:] = drafts_SD[slots_R][:, : count - 1].long()
    proposed_RN = known_RN & (draft_RN >= 0)
    right_RN = proposed_RN & (draft_RN == token_RN.gather(1, above_RN))
    if tree_SN is not None:
        first_RN = torch.full_like(above_RN, count)
        first_RN.scatter_reduce_(1, above_RN, torch.where(right_RN, node_N, count), "amin")
        right_RN &= first_RN.gather(1, above_RN) == node_N
    right_RN[:, :1] = known_RN[:, :1]
    before_R = kv_len_R - num_logits_R  # cached before the first of these nodes
    stops_RN = (stop_ids_SE[slots_R][:, None] == token_RN[..., None]).any(-1)
    full_RN = before_R[:, None] + depth_RN + 2 >= max_len_S[slots_R][:, None]
    code_RN = torch.where(stops_RN, Finish.STOP, torch.where(full_RN, Finish.LENGTH, Finish.NONE))
    code_RN = torch.where(token_RN < 0, Finish.NAN, code_RN)
    right_R1 = (right_RN * own_N).sum(1, keepdim=True)
    ended_R1 = ((code_RN != Finish.NONE) * own_N).sum(1, keepdim=True)
    reached_RN = right_RN & (bits_RN & ~right_R1 == 0) & ((bits_RN ^ own_N) & ended_R1 == 0)  # nothing ended above
    emits_RN = reached_RN & (token_RN >= 0)
    count_R = emits_RN.sum(1)
    finish_R = (code_RN * reached_RN).amax(1)  # one of them at most
    place_RN = torch.where(emits_RN, depth_RN, columns)
    for out_RK, each_RN in ((emitted.token_RK, token_RN), (emitted.path_RK, node_N.expand_as(token_RN))):
        if out_RK is not None:
            found_RK = out_RK.new_full((len(slots_R), columns + 1), -1)
            out_RK.copy_(found_RK.scatter_(1, place_RN, each_RN.to(out_RK.dtype))[:, :columns])
    emitted.finish_R.copy_(finish_R)
    emitted.drafted_R.copy_(proposed_RN.sum(1))
    length_R = before_R + torch.maximum(count_R, num_logits_R.clamp(max=1))
    kv_len_S[slots_R] = torch.where(active_R & (kv_len_R > 0), length_R, kv_len_S[slots_R])
    newest_R = emitted.token_RK.gather(1, (count_R - 1).clamp(min=0)[:, None])[:, 0].long()
    last_token_S[slots_R] = torch.where(count_R > 0, newest_R, last_token_S[slots_R])
    stopped_S[slots_R] |= (finish_R != Finish.NONE).int()
    if output_count_SV is not None:
        places = slots_R[:, None].expand_as(token_RN), torch.where(emits_RN, token_RN, 0)
        output_count_SV.index_put_(places, emits_RN.to(output_count_SV.dtype), accumulate=True)


STEP_VERIFY = Op(
    "step_verify",
    step_verify,
    (
        Implementation("triton", "ridgeline.kernels.step.triton_verify:step_verify", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.verify:step_verify"),
    ),
)
