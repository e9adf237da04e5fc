"""A plan in the making, and a plan under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from ridgeline.core.plan.crossed import CrossedPictures
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.step import Feature, Guided, RowKind, Rows, Span, StepPlan
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable

# As numbers, see `Feature`
SCORED, MASK, GIVEN = int(Feature.PROMPT_LOGPROBS), int(Feature.MASK), int(Feature.GIVEN)
LOGPROBS, GUIDANCE = int(Feature.LOGPROBS), int(Feature.GUIDANCE)
KEPT_COUNTS = 1024  # numbers of rows whose arrays of equal entries are kept
TOKEN, VERIFY, CHUNK = int(RowKind.TOKEN), int(RowKind.VERIFY), int(RowKind.CHUNK)


def build_rows(
    seqs: list[Sequence],
    columns_R: np.ndarray,
    slots: SlotTable,
    kinds_R: np.ndarray,
    num_tokens_R: np.ndarray,
    num_logits_R: np.ndarray,
    tokens_each: int,
    marks_R: np.ndarray | None = None,
    encoded_R: np.ndarray | None = None,
) -> Rows:
    """Rows of running sequences, as a struct of arrays. columns_R: their slots. A guided request's two sample together
    or not at all. Only chunks can have a prompt to score."""
    if len(slots.kinds) == 1:
        [(features, num_logprobs)] = slots.kinds
    else:
        features = int(np.bitwise_or.reduce(slots.features[columns_R], initial=0))
        num_logprobs = int(np.maximum.reduce(slots.num_logprobs[columns_R], initial=0))
    if features & SCORED:
        chunks = (kinds_R == CHUNK).nonzero()[0].tolist()
        if not any(seqs[row].features & SCORED for row in chunks):
            features &= ~SCORED
    if features & MASK:
        verify = (kinds_R == VERIFY).nonzero()[0].tolist()
        if any(seqs[row].features & MASK for row in verify):
            features |= GIVEN
    return Rows(
        slots_R=columns_R.astype(np.int32),
        generations_R=slots.generation[columns_R],
        kinds_R=kinds_R,
        num_tokens_R=num_tokens_R,
        num_logits_R=num_logits_R,
        tokens_each=tokens_each,
        features=features,
        num_logprobs=num_logprobs,
        guided=_guided(seqs, num_logits_R) if features & GUIDANCE else (),
        marks_R=marks_R,
        encoded_R=encoded_R,
    )


def _guided(seqs: list[Sequence], num_logits_R: np.ndarray) -> tuple[Guided, ...]:
    row_of = {seq: row for row, seq in enumerate(seqs)}
    return tuple(
        Guided(row, row_of[seq.companion], seq.request.params.guidance_scale)
        for row, seq in enumerate(seqs)
        if seq.companion is not None and num_logits_R[row]
    )


class Standing(NamedTuple):
    """The decoding set: rows that sample all their tokens. columns_R: where `SlotTable` has them, as numpy
    wants its indices. last_kv_len_R: from there; it does not change while the request keeps its slot. ids, tokens: of
    each row the request's id, and the list that takes its token.
    """

    seqs: list[Sequence]
    rows: Rows
    columns_R: np.ndarray
    last_kv_len_R: np.ndarray
    ids: list[str]
    tokens: list[list[int]]

    @staticmethod
    def of(seqs: list[Sequence], slots: SlotTable, *, drafts: int, emits: int | None = None) -> Standing:
        """Each runs its last token, and behind it the drafts that it verifies, so many at most. emits: the tokens that
        each may emit, if that is less than it runs."""
        columns_R = np.array([seq.slot for seq in seqs], np.intp)
        last_kv_len_R = slots.last_kv_len[columns_R]
        given = [seq.id for seq in seqs], [seq.tokens for seq in seqs]
        if not drafts:
            return Standing(seqs, _token_rows(seqs, columns_R, slots), columns_R, last_kv_len_R, *given)
        counts_R = np.array([1 + min(seq.drafts, drafts) for seq in seqs], np.int32)
        kinds_R = np.where(counts_R == 1, TOKEN, VERIFY).astype(np.int8)
        each = int(counts_R[0]) if len(seqs) else 1
        if (counts_R != each).any():
            each = 0
        logits_R = counts_R if emits is None else np.minimum(counts_R, emits)
        rows = build_rows(seqs, columns_R, slots, kinds_R, counts_R, logits_R, each)
        return Standing(seqs, rows, columns_R, last_kv_len_R, *given)

    def after(self, changes: Iterable[tuple[Sequence, bool]], slots: SlotTable) -> Standing:
        """Return the set that `of` makes without drafts, once some sequences have come (True) to these or left them
        (False), in this order."""
        gone, come = list[int](), list[Sequence]()
        for seq, comes in changes:
            if comes:
                come.append(seq)
            elif seq in come:
                come.remove(seq)
            else:
                gone.append(self.seqs.index(seq))
        seqs, ids, tokens = self.seqs.copy(), self.ids.copy(), self.tokens.copy()
        gone.sort()
        for row in reversed(gone):
            del seqs[row], ids[row], tokens[row]
        seqs += come
        ids += [seq.id for seq in come]
        tokens += [seq.tokens for seq in come]
        stay = [self.columns_R[start:end] for start, end in zip([0, *(row + 1 for row in gone)], [*gone, None])]  # noqa: B905
        columns_R = np.concatenate([*stay, np.array([seq.slot for seq in come], np.intp)])
        return Standing(seqs, _token_rows(seqs, columns_R, slots), columns_R, slots.last_kv_len[columns_R], ids, tokens)


def _token_rows(seqs: list[Sequence], columns_R: np.ndarray, slots: SlotTable) -> Rows:
    """Return rows that run their last token each."""
    kinds_R, ones_R = _of_tokens(len(seqs))
    return build_rows(seqs, columns_R, slots, kinds_R, ones_R, ones_R, 1)


@lru_cache(KEPT_COUNTS)
def _of_tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the kinds of so many rows of one token, and as many ones. Plans share them, as they share rows."""
    return np.full(count, TOKEN, np.int8), np.ones(count, np.int32)


NOBODY = Standing.of([], SlotTable(0), drafts=0)


class PlanBuilder:
    """The standing decode rows (shared, not copied, when nothing else runs) and the rows besides them."""

    def __init__(self, budget: int, slots: SlotTable) -> None:
        self.budget, self._most, self._slots = budget, budget, slots
        self.share = 0  # tokens of one prompt at most; 0: as many as fit
        self.standing = NOBODY
        self.published: list[bytes] = []  # hashes of the prompt blocks this plan will write
        self.copying: list[Sequence] = []  # those that take over the beginning of another's block
        self.chunks: list[tuple[Sequence, int, int]] = []  # rows of known tokens: their first, and their end
        self.marks: dict[Sequence, int] = {}  # after how many of its tokens a row's state is stored as well
        self.others: list[Sequence] = []  # those of the rows besides the standing ones
        self._num_tokens: list[int] = []
        self._num_logits: list[int] = []
        self._spans: list[np.ndarray | None] = []
        self._inserted: list[tuple[Inserted, ...]] = []
        self._encoded: list[tuple[int, ...]] = []
        self.positions: dict[Sequence, np.ndarray] = {}  # of rows, where these have three axes
        self.both_ways: dict[Sequence, tuple[tuple[int, int], ...]] = {}  # of rows, as in `Span`
        self._crossed: dict[Sequence, CrossedPictures] = {}
        self._reads: list[int] = []  # tokens of these that the encoder runs
        self.encoded_tokens = 0  # of the encoder inputs that rows bring
        self.seen_tokens = 0  # those that cost as much as the pictures that the plan brings to the tower
        self.loads = 0  # the number of the last load from the host's memory that rows wait for

    @property
    def seqs(self) -> Iterator[Sequence]:
        """The sequences that have rows so far."""
        return chain(self.standing.seqs, self.others)

    @property
    def columns_R(self) -> np.ndarray:
        """Slots of the rows so far."""
        standing_R = self.standing.columns_R
        return np.append(standing_R, [seq.slot for seq in self.others]) if self.others else standing_R

    @property
    def room(self) -> int:
        """The tokens that the step can still hold, whatever its budget."""
        return self._most - int(self.standing.rows.num_tokens_R.sum()) - sum(self._num_tokens) - self.encoded_tokens

    def add(
        self,
        seq: Sequence,
        num_tokens: int,
        num_logits: int,
        span: np.ndarray | None,
        inserted: tuple[Inserted, ...] = (),
        encoded: tuple[int, ...] = (),
        crossed: CrossedPictures | None = None,
    ) -> None:
        """A row besides the standing ones; span None: its input is the slot's last token. inserted, encoded, crossed:
        as in `Span`."""
        reads = 0 if seq.heard else len(encoded)
        if crossed is not None:
            self._crossed[seq] = crossed
        self.budget -= num_tokens + reads
        self.others.append(seq)
        self._num_tokens.append(num_tokens)
        self._num_logits.append(num_logits)
        self._spans.append(span)
        self._inserted.append(inserted)
        self._encoded.append(encoded)
        self._reads.append(reads)
        self.encoded_tokens += reads

    def takes(self, cost: int) -> None:
        """Take a tower's work from the budget: as many tokens as cost as much."""
        self.seen_tokens += cost
        self.budget -= cost

    def assemble(self) -> tuple[list[Sequence], Rows, tuple[Span, ...]]:
        """The plan's sequences and rows, standing ones first, and the spans of input tokens."""
        seqs, rows = self.standing.seqs, self.standing.rows
        if not self.others:
            return seqs, rows, ()
        first = len(seqs)
        given = enumerate(zip(self.others, self._spans, self._inserted, self._encoded, strict=True), first)
        spans = tuple(
            Span(
                row,
                ids,
                inside,
                read,
                self.positions.get(seq),
                seq.request.sound if read else None,
                bool(read and seq.heard),
                self.both_ways.get(seq, ()),
                self._crossed.get(seq),
            )
            for row, (seq, ids, inside, read) in given
            if ids is not None
        )
        return seqs + self.others, _concatenate(rows, self._rows()), spans

    def _rows(self) -> Rows:
        """Return the rows besides the standing ones."""
        return build_rows(
            self.others,
            np.array([seq.slot for seq in self.others], np.intp),
            self._slots,
            np.array([TOKEN if ids is None else CHUNK for ids in self._spans], np.int8),
            np.array(self._num_tokens, np.int32),
            np.array(self._num_logits, np.int32),
            tokens_each=int(max(self._num_tokens) == 1),  # longer ones are chunks
            marks_R=np.array([self.marks.get(seq, 0) for seq in self.others], np.int32) if self.marks else None,
            encoded_R=np.array(self._reads, np.int32) if self.encoded_tokens else None,
        )


def _concatenate(a: Rows, b: Rows) -> Rows:
    if not len(a):
        return b
    return Rows(
        slots_R=np.concatenate([a.slots_R, b.slots_R]),
        generations_R=np.concatenate([a.generations_R, b.generations_R]),
        kinds_R=np.concatenate([a.kinds_R, b.kinds_R]),
        num_tokens_R=np.concatenate([a.num_tokens_R, b.num_tokens_R]),
        num_logits_R=np.concatenate([a.num_logits_R, b.num_logits_R]),
        tokens_each=a.tokens_each if a.tokens_each == b.tokens_each else 0,
        features=a.features | b.features,
        num_logprobs=max(a.num_logprobs, b.num_logprobs),
        prefixes=a.prefixes,  # the standing rows come first; no others have any
        marks_R=None if b.marks_R is None else np.concatenate([np.zeros(len(a), np.int32), b.marks_R]),
        encoded_R=None if b.encoded_R is None else np.concatenate([np.zeros(len(a), np.int32), b.encoded_R]),
        guided=a.guided + tuple(Guided(row + len(a), by + len(a), scale) for row, by, scale in b.guided),
    )


class InFlight:
    """A submitted plan and what the scheduler needs when its result comes. departures: how many had left their slots
    when it was made. verifies: some of its rows verify drafts. made: the moment, on the engine's clock. ends_R: the
    plan's kv_bound_R, less what results since then took back; exact for a row that does not verify, once all results
    before are in. standing: its first rows."""

    __slots__ = ("departures", "ends_R", "made", "masks_given", "plan", "published", "seqs", "standing", "verifies")

    def __init__(
        self,
        plan: StepPlan,
        seqs: list[Sequence],
        published: list[bytes],
        departures: int = 0,
        made: float = 0.0,
        standing: Standing = NOBODY,
    ) -> None:
        self.standing = standing
        self.departures = departures
        self.made = made
        self.plan = plan
        self.seqs = seqs
        self.published = published
        self.ends_R = plan.kv_bound_R
        self.masks_given = not plan.rows.features & MASK
        self.verifies = plan.rows.tokens_each != 1 and bool((plan.rows.kinds_R == VERIFY).any())
