"""A step's work beside the network: inputs are made from the slots before it; after it slots advance and the outcome is
posted.

The ops read nothing back and depend on shapes alone, so they can be captured with the step. Rows and tokens may be
padded. Rows beyond the batch name a stopped slot that no request uses, and have tokens or none. Tokens behind the last
row's belong to no row.

Legend:
    T  tokens
    R  rows
    S  slots
    A  cache groups
    C  columns of a block table
    E  stop ids of a slot
    V  vocabulary
    D  drafts of a slot, at most
    N  nodes of a slot's tree, at most
    Q  outcomes that the ring keeps
    O  octets (bytes) of an outcome, or of a row of the ring
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.limits import NULL_BLOCK
from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.base.rows import Finish
from ridgeline.kernels.base.tree import Tree

HEADER = 8  # bytes before the outcome in a row of the ring, which hold the turn


class StepRows(NamedTuple):
    """The rows of a step: row r owns tokens start_R1[r] … start_R1[r + 1] - 1. All are int32.

    override_T: the ids of tokens that the host knows; negative: the device does.
    """

    slots_R: Tensor
    start_R1: Tensor
    override_T: Tensor


class SlotTables(NamedTuple):
    """The tables by slot that rows continue from.

    stopped_S, block_tables_ASC: int32. The columns of block tables are contiguous.
    """

    kv_len_S: Tensor
    last_token_S: Tensor
    stopped_S: Tensor
    block_tables_ASC: Tensor
    block_size: int


class SlotDrafts(NamedTuple):
    """The drafts of slots that are to run.

    drafts_SD: int32; None if only first tokens have no override.
    tree_SN: int64, the bits of each slot's nodes (kernels/base/tree.py), if rows have trees of drafts. Then tokens
        without override are nodes, one after another: their places follow each other, and their positions are by depth.
        Node n is the slot's last token or its draft n - 1. Tokens with override lie in no tree.
    base_S: int64, where node 0 of each slot lies, in passes whose rows begin with a later node. None: rows begin with
        node 0.
    """

    drafts_SD: Tensor | None = None
    tree_SN: Tensor | None = None
    base_S: Tensor | None = None


NO_DRAFTS = SlotDrafts()


class SlotAdvance(NamedTuple):
    """The rows of a step, of which kv_len_R and active_R are those of `step_inputs`, and the tables by slot in which
    they advance."""

    slots_R: Tensor
    kv_len_R: Tensor
    active_R: Tensor
    stop_ids_SE: Tensor
    max_len_S: Tensor
    kv_len_S: Tensor
    last_token_S: Tensor
    stopped_S: Tensor
    output_count_SV: Tensor | None


class StepInputs(NamedTuple):
    """The inputs of the network. token_ids_T, positions_T, places_AT, kv_len_R and last_R are int64; active_R and
    live_T are bool. tree: the keys that each token of a tree sees; None without trees."""

    token_ids_T: Tensor
    positions_T: Tensor
    places_AT: Tensor
    kv_len_R: Tensor
    last_R: Tensor
    active_R: Tensor
    live_T: Tensor
    tree: Tree | None = None


def step_inputs(rows: StepRows, slots: SlotTables, drafts: SlotDrafts = NO_DRAFTS) -> StepInputs:
    """Make a step's inputs from its rows and their slots.

    A row continues where its slot's cache ends. A token's id is its override. Where that is negative it is the slot's
    last token for the row's first token, and for its others the slot's drafts in their order; a draft that is negative,
    which says that there is none, runs as token 0. place = block * block_size + offset, by each group's block table.

    Of the results, kv_len_R is the number of cached tokens after the step and last_R the row's last token; both are 0
    for rows without tokens. Stopped rows write to the null block, from position 0, and have kv_len 1, so that their
    attention stays defined. Tokens of no row get token 0, position 0 and place 0. live_T says which tokens belong to a
    row that is not stopped.
    """
    kv_len_S, last_token_S, stopped_S, block_tables_ASC, block_size = slots
    drafts_SD, tree_SN, base_S = drafts
    start_R1, override_T, slots_R = rows.start_R1, rows.override_T, rows.slots_R.long()
    starts_R, counts_R = start_R1[:-1].long(), start_R1.diff().long()
    token_T = torch.arange(len(override_T), device=override_T.device)
    row_T = torch.searchsorted(start_R1[1:].long(), token_T, right=True).clamp(max=len(slots_R) - 1)
    owned_T = token_T < start_R1[-1]
    active_R = stopped_S[slots_R] == 0
    length_R = kv_len_S[slots_R]
    live_T = owned_T & active_R[row_T]
    index_T = torch.where(live_T, length_R[row_T] + token_T - starts_R[row_T], 0)
    base_R = length_R if base_S is None else base_S[slots_R]
    node_T = token_T - starts_R[row_T] + (length_R - base_R)[row_T]
    next_T = last_token_S[slots_R[row_T]]
    if drafts_SD is not None:
        draft_T = drafts_SD[slots_R[row_T], (node_T - 1).clamp(0, drafts_SD.shape[1] - 1)]
        next_T = torch.where(node_T > 0, draft_T.long().clamp(min=0), next_T)
    given_T = torch.where(override_T >= 0, override_T.long(), next_T)
    positions_T, tree = index_T, None
    if tree_SN is not None:
        drafted_T = live_T & (override_T < 0) & (node_T > 0)
        bits_T = torch.where(drafted_T, tree_SN[slots_R[row_T], node_T.clamp(0, tree_SN.shape[1] - 1)], 1)
        tree = Tree(bits_T, torch.where(drafted_T, base_R[row_T], index_T))
        positions_T = tree.positions_T
    block_AT = torch.where(live_T, block_tables_ASC[:, slots_R[row_T], index_T // block_size], NULL_BLOCK)
    kv_len_R = torch.where(active_R, length_R + counts_R, 1)
    return StepInputs(
        torch.where(owned_T, given_T, 0),
        positions_T,
        block_AT.long() * block_size + index_T % block_size,
        torch.where(counts_R > 0, kv_len_R, 0),
        torch.where(counts_R > 0, starts_R + counts_R - 1, 0),
        active_R,
        live_T,
        tree,
    )


class StepMetadata(NamedTuple):
    """Fields of `kernels.scans.metadata.ScanMetadata` by the same names: marks_R is int32, fresh_R bool, the others
    int64."""

    reads_R: Tensor
    writes_R: Tensor
    fresh_R: Tensor
    marks_R: Tensor
    marked_R: Tensor


def step_metadata(
    slots_R: Tensor,
    start_R1: Tensor,
    kv_len_R: Tensor,
    last_R: Tensor,
    place_T: Tensor,
    marks_R: Tensor | None,
    block_table_SC: Tensor,
    block_size: int,
) -> StepMetadata:
    """Return the blocks of a group's states that the rows read and write.

    A row reads the block of the last token before the step, and writes that of its own last token; the state at its
    mark goes to the block of the token at the mark. Rows that the device has stopped, and rows without tokens, write to
    the null block and have no marks.

    kv_len_R, last_R, place_T: those of `step_inputs`, place_T of this group.
    marks_R: int32, or None if no row has a mark.
    """
    before_R = kv_len_R - start_R1.diff()  # below 1 for stopped rows
    slots_R = slots_R.long()
    writes_R = torch.where(kv_len_R > 0, place_T[last_R] // block_size, NULL_BLOCK)
    reads_R = block_table_SC[slots_R, (before_R - 1).clamp(min=0) // block_size].long()
    wanted_R = torch.zeros_like(slots_R, dtype=torch.int32) if marks_R is None else marks_R
    marks_R = torch.where(writes_R != NULL_BLOCK, wanted_R, 0)
    column_R = (before_R + marks_R - 1).clamp(min=0) // block_size
    marked_R = torch.where(marks_R > 0, block_table_SC[slots_R, column_R].long(), NULL_BLOCK)
    return StepMetadata(reads_R, writes_R, before_R <= 0, marks_R, marked_R)


def step_advance(
    token_R: Tensor, samples_R: Tensor, advance: SlotAdvance, out_token_R: Tensor, out_finish_R: Tensor
) -> None:
    """Take the drawn tokens into the slots, and find the rows that have finished; in place.

    A row emits a token if it is active and samples_R (bool) says so. Rows that are not active change nothing.

    out_token_R: int32, the row's token, or -1.
    out_finish_R: int8, the row's `Finish` code: NAN if no token could be drawn (-1), STOP if the token is one of its
        stop ids (-1: unused), else LENGTH if the slot now holds max_len tokens, the new one included.
    """
    slots_R, kv_len_R, active_R, stop_ids_SE, max_len_S, kv_len_S, last_token_S, stopped_S, output_count_SV = advance
    slots_R, token_R = slots_R.long(), token_R.long()
    emits_R = active_R & samples_R
    stops_R = (stop_ids_SE[slots_R] == token_R[:, None]).any(1)
    full_R = kv_len_R + 1 >= max_len_S[slots_R]
    finish_R = torch.where(stops_R, Finish.STOP, torch.where(full_R, Finish.LENGTH, Finish.NONE))
    finish_R = torch.where(token_R < 0, Finish.NAN, finish_R)
    finish_R = torch.where(emits_R, finish_R, Finish.NONE)
    out_token_R.copy_(torch.where(emits_R, token_R, -1))
    out_finish_R.copy_(finish_R)
    # Inactive rows may share a slot, with each other but never with an active row, so rewriting it is harmless.
    kv_len_S[slots_R] = torch.where(active_R & (kv_len_R > 0), kv_len_R, kv_len_S[slots_R])
    drawn_R = emits_R & (token_R >= 0)
    last_token_S[slots_R] = torch.where(drawn_R, token_R, last_token_S[slots_R])
    stopped_S[slots_R] |= (finish_R != Finish.NONE).int()
    if output_count_SV is not None:
        counted_R = drawn_R.to(output_count_SV.dtype)
        output_count_SV.index_put_((slots_R, torch.where(drawn_R, token_R, 0)), counted_R, accumulate=True)


def step_post(packed_O: Tensor, ring_QO: Tensor, turn_1: Tensor) -> None:
    """Write the turn (int64) and then the outcome's bytes to row turn % Q of a ring on the host, and count the turn.

    turn_1 is int64, the others are uint8. The ring is page-locked if the outcome is on a GPU.
    """
    turn = int(turn_1)
    row_O = ring_QO[turn % len(ring_QO)]
    row_O[:HEADER].view(torch.int64).fill_(turn)
    row_O[HEADER : HEADER + len(packed_O)].copy_(packed_O)
    turn_1 += 1


STEP_INPUTS = Op(
    "step_inputs",
    step_inputs,
    (
        Implementation("triton", "ridgeline.kernels.step.triton:step_inputs", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.op:step_inputs"),
    ),
)
STEP_METADATA = Op(
    "step_metadata",
    step_metadata,
    (
        Implementation("triton", "ridgeline.kernels.step.triton:step_metadata", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.op:step_metadata"),
    ),
)
STEP_ADVANCE = Op(
    "step_advance",
    step_advance,
    (
        Implementation("triton", "ridgeline.kernels.step.triton:step_advance", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.op:step_advance"),
    ),
)
STEP_POST = Op(
    "step_post",
    step_post,
    (
        Implementation("triton", "ridgeline.kernels.step.triton:step_post", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.op:step_post"),
    ),
)
