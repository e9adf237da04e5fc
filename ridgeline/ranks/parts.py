"""A plan in parts, one for each stage of a pipeline: while one stage runs a part, the stage before runs the next.

Parts are plans. They run in order on every stage, as whole plans do, so only dependences between rows of one plan need
care. A chunk of a prompt may read keys that a chunk before it writes in the same plan (a prefix they share), so chunks
keep their order; long ones are cut. Rows that decode read nothing that their plan writes, so they can go to any part:
each part gets equally many, rows with a common prefix stay together, and so does a guided pair.

A state of constant size passes from piece to piece of a chunk in the block for the state after the whole chunk: the
engine has put this block into all entries of the row's table in which a piece may end (`EngineConfig.cuts_chunks`). No
other row reads that block in the same plan. Only the entry of a mark names another block, for the state at the mark. No
piece before the mark ends in that block: the next piece would overwrite the state that it reads there.

A row needs the token of the plan before. `StepPlan.after` says which part must have brought it, on all stages.

Legend:
    R  rows of the plan, or of a part
    S  slots
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ridgeline.core.plan.embeds import parts_between
from ridgeline.core.plan.step import Assign, Feature, Guided, PrefixGroup, RowKind, Rows, Span, StepPlan

T = TypeVar("T")

LEAST_PIECE = 128  # tokens: with fewer, reading the weights once more takes longer than a stage waits
# Prompts of a step make it more parts than there are stages, if each gets so many tokens, which a GPU computes as fast
# as more of them: a step that runs alone then leaves stages less time without work
LONG_PIECE, FINER = 1024, 4
PART_BITS = 16


@dataclass(frozen=True)
class Part:
    """A part of a plan.

    rows_R: the rows of the whole plan that its rows are, or are pieces of.
    ends_R: True for rows that end here: of a chunk that was cut, the last piece.
    """

    plan: StepPlan
    rows_R: np.ndarray
    ends_R: np.ndarray


@dataclass(frozen=True)
class Cut:
    """The rows of a plan that a part has: of row rows_R[r] the tokens starts_R[r] to ends_R[r] - 1."""

    rows_R: np.ndarray
    starts_R: np.ndarray
    ends_R: np.ndarray


class Dealer:
    """Takes plans apart for so many stages, and numbers the parts: behind the plan's number come PART_BITS bits. No
    chunk is cut into pieces of fewer tokens than least_piece, unless a mark is near.

    block_size: of the cache, by which marks lie.
    most: parts that a plan has at most: as many as there are stages, so that all are at work, but FINER times as many
        for prompts of long_piece tokens for each.
    """

    def __init__(
        self, stages: int, least_piece: int = LEAST_PIECE, long_piece: int = LONG_PIECE, *, block_size: int = 1
    ) -> None:
        self._stages, self._least, self._long, self.most = stages, least_piece, long_piece, stages
        self._block_size = block_size
        self._drawn_S = np.full(64, -1, np.int64)  # the newest part that draws a token of the slot
        self._dealt: tuple[Rows, list[tuple[Cut, Rows]]] | None = None  # of the newest plan without chunks

    @property
    def bits(self) -> int:
        """The bits of a part's number behind those of its plan."""
        return PART_BITS if self._stages > 1 else 0

    def parts(self, plan: StepPlan) -> list[Part]:
        """Return the plan's parts in order. With one stage that is the plan itself."""
        if self._stages == 1:
            everything_R = np.arange(len(plan.rows))
            return [Part(plan, everything_R, np.ones(len(plan.rows), np.bool_))]
        return [self._part(plan, index, cut, rows) for index, (cut, rows) in enumerate(self._cuts(plan))]

    def _cuts(self, plan: StepPlan) -> list[tuple[Cut, Rows]]:
        """Return the rows of each part. Plans that share their rows have parts that do."""
        rows = plan.rows
        if self._dealt is not None and self._dealt[0] is rows:
            return self._dealt[1]
        prompts = int(rows.num_tokens_R[rows.kinds_R == RowKind.CHUNK].sum())
        most = max(self.most, min(FINER * self.most, prompts // self._long))
        found = [(cut, _rows_of(rows, cut)) for cut in cuts(rows, most, self._least, self._block_size)]
        if not plan.spans:
            self._dealt = rows, found
        return found

    def _part(self, plan: StepPlan, index: int, cut: Cut, rows: Rows) -> Part:
        whole = plan.rows.num_tokens_R[cut.rows_R]
        part = StepPlan(
            id=plan.id << PART_BITS | index,
            rows=rows,
            kv_bound_R=plan.kv_bound_R[cut.rows_R] - (whole - cut.ends_R),
            spans=_spans_of(plan, cut),
            deltas=() if index else plan.deltas,
            copies=() if index else plan.copies,
            moves=None if index else plan.moves,
            adapters=() if index else plan.adapters,
            forgets=() if index else plan.forgets,
            reset=plan.reset and not index,
            expected=_expected_of(plan, cut),
            after=self._after(plan, rows, first=not index),
        )
        self._drawn_S[rows.slots_R[rows.num_logits_R > 0]] = part.id
        return Part(part, cut.rows_R, cut.ends_R == whole)

    def _after(self, plan: StepPlan, rows: Rows, *, first: bool) -> int:
        """Return the newest part that draws a token of a slot that the part runs, or gives to another part."""
        touched = rows.slots_R.tolist()
        if first:
            touched += [delta.slot for delta in plan.deltas if isinstance(delta, Assign)]
        if (missing := max(touched, default=0) + 1 - len(self._drawn_S)) > 0:
            self._drawn_S = np.append(self._drawn_S, np.full(missing, -1, np.int64))
        return int(self._drawn_S[touched].max(initial=-1))


def cuts(rows: Rows, most: int, least_piece: int, block_size: int = 1) -> list[Cut]:
    """Deal the rows out to at most so many parts of about equally many tokens. block_size: of the cache."""
    chunks_R = rows.kinds_R == RowKind.CHUNK
    decoding = _beside_each_other(rows, np.flatnonzero(~chunks_R))
    shares = _equal(decoding, most, rows.guided)
    given = [int(rows.num_tokens_R[share].sum()) for share in shares]
    pieces = _pieces(rows, np.flatnonzero(chunks_R), given, least_piece, block_size)
    found = []
    for share, chunk in zip(shares, pieces, strict=True):
        decoding_R = np.sort(np.array(share, np.intp))
        rows_R = np.append(decoding_R, np.array([row for row, _, _ in chunk], np.intp))
        starts_R = np.append(np.zeros(len(decoding_R), np.int64), [start for _, start, _ in chunk])
        ends_R = np.append(rows.num_tokens_R[decoding_R], [end for _, _, end in chunk])
        if len(rows_R):
            found.append(Cut(rows_R, starts_R.astype(np.int64), ends_R.astype(np.int64)))
    return found


def _beside_each_other(rows: Rows, decoding_R: np.ndarray) -> list[int]:
    """Return decoding rows in an order in which those with a common prefix, and guided pairs, are neighbours."""
    place = {row: (len(rows.prefixes), row) for row in decoding_R.tolist()}
    for number, group in enumerate(rows.prefixes):
        place |= {row: (number, row) for row in group.rows.tolist() if row in place}
    for row, negative, _ in rows.guided:
        if row in place and negative in place:
            number, first = place[row]
            place[row], place[negative] = (number, first), (number, first)
    return sorted(place, key=place.__getitem__)


def _equal(ordered: list[int], parts: int, guided: tuple[Guided, ...]) -> list[list[int]]:
    """Cut a list into equal parts, but not between the two of a pair."""
    other = {row: negative for row, negative, _ in guided} | {negative: row for row, negative, _ in guided}
    shares: list[list[int]] = []
    start = 0
    for part in range(parts):
        end = max(start, -(-len(ordered) * (part + 1) // parts))
        if start < end < len(ordered) and other.get(ordered[end - 1]) == ordered[end]:
            end += 1
        shares.append(ordered[start:end])
        start = end
    return shares


def _pieces(
    rows: Rows, chunks: np.ndarray, given: list[int], least_piece: int, block_size: int
) -> list[list[tuple[int, int, int]]]:
    """Deal chunks out in their order: (row, first token, end) by part. given: tokens that the parts have already."""
    target = -(-(sum(given) + int(rows.num_tokens_R[chunks].sum())) // len(given))
    room = [max(0, target - tokens) for tokens in given]
    found: list[list[tuple[int, int, int]]] = [[] for _ in given]
    part = 0
    for atom in _atoms(rows, chunks.tolist()):
        start, end = 0, int(rows.num_tokens_R[atom].sum())
        whole = len(atom) > 1 or bool(rows.features & Feature.MASK)  # a later piece would not wait for the masks
        mark = 0 if rows.marks_R is None else int(rows.marks_R[atom[0]])
        while start < end:
            count, last = end - start, part == len(given) - 1
            if not last and count > room[part]:
                if not whole and min(room[part], count - room[part]) >= least_piece:
                    count = room[part]
                    if mark - block_size < start + count < mark:
                        count = mark - start
                elif 2 * room[part] < count:  # most of it is beyond this part's share
                    part += 1
                    continue
            found[part] += [(row, start, min(start + count, int(rows.num_tokens_R[row]))) for row in atom]
            room[part] -= count
            start += count
            if room[part] <= 0 and not last:
                part += 1
    return found


def _atoms(rows: Rows, chunks: list[int]) -> list[list[int]]:
    """Return chunks one by one, but a guided pair that samples, and what lies between the two, together."""
    joined = {max(row, negative): min(row, negative) for row, negative, _ in rows.guided}
    atoms: list[list[int]] = []
    for row in chunks:
        atoms.append([row])
        while row in joined and atoms[-1][0] > joined[row]:
            atoms[-2:] = [atoms[-2] + atoms[-1]]
    return atoms


def _rows_of(rows: Rows, cut: Cut) -> Rows:
    index = {row: own for own, row in enumerate(cut.rows_R.tolist())}
    counts_R = (cut.ends_R - cut.starts_R).astype(rows.num_tokens_R.dtype)
    ends_R, kinds_R = cut.ends_R == rows.num_tokens_R[cut.rows_R], rows.kinds_R[cut.rows_R]
    # One chunk may read what another writes, and rows of one token each are written and read in any order
    single = counts_R.max() == 1 and np.count_nonzero(kinds_R == RowKind.CHUNK) < 2
    groups = ((np.array([index[row] for row in group.rows.tolist() if row in index]), group.tokens)
              for group in rows.prefixes)  # fmt: skip
    return replace(
        rows,
        slots_R=rows.slots_R[cut.rows_R],
        generations_R=rows.generations_R[cut.rows_R],
        kinds_R=kinds_R,
        num_tokens_R=counts_R,
        num_logits_R=np.where(ends_R, rows.num_logits_R[cut.rows_R], 0).astype(rows.num_logits_R.dtype),
        tokens_each=rows.tokens_each or int(single),
        prefixes=tuple(PrefixGroup(own_R, tokens) for own_R, tokens in groups if len(own_R) > 1),
        guided=tuple(
            Guided(index[row], index[negative], scale)
            for row, negative, scale in rows.guided
            if row in index and ends_R[index[row]]
        ),
        marks_R=None if rows.marks_R is None else _marks_of(rows.marks_R, cut),
    )


def _marks_of(marks_R: np.ndarray, cut: Cut) -> np.ndarray:
    """Return the marks inside pieces. A piece that ends at a mark stores its state there anyway."""
    inside_R = (cut.starts_R < marks_R[cut.rows_R]) & (marks_R[cut.rows_R] < cut.ends_R)
    return np.where(inside_R, marks_R[cut.rows_R] - cut.starts_R, 0).astype(marks_R.dtype)


def _spans_of(plan: StepPlan, cut: Cut) -> tuple[Span, ...]:
    if not plan.spans:
        return ()
    spans = {span.row: span for span in plan.spans}
    of_rows = enumerate(zip(cut.rows_R.tolist(), cut.starts_R.tolist(), cut.ends_R.tolist(), strict=True))
    return tuple(_piece_of(spans[row], own, start, end) for own, (row, start, end) in of_rows if row in spans)


def _piece_of(span: Span, row: int, start: int, end: int) -> Span:
    positions_3T = None if span.positions_3T is None else span.positions_3T[:, start:end]
    return Span(row, span.token_ids[start:end], parts_between(span.inserted, start, end), positions_3T=positions_3T)


def _expected_of(plan: StepPlan, cut: Cut) -> Mapping[int, Assign] | None:
    """Return the full forms of the rows that begin in this part: later pieces start from another length."""
    if plan.expected is None:
        return None
    slots = plan.rows.slots_R[cut.rows_R[cut.starts_R == 0]].tolist()
    return {slot: plan.expected[slot] for slot in slots if slot in plan.expected}


def given_to(part: Part, given: Mapping[int, T]) -> dict[int, T]:
    """Return the values given for a part's rows, by the part's own row numbers."""
    return {own: given[row] for own, row in enumerate(part.rows_R.tolist()) if row in given}
