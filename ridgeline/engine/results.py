"""A plan's result: its tokens go to the requests that ran in it, and some of these end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as PySequence
from typing import Protocol

import numpy as np

from ridgeline.core.plan.request import Preemption, StepEvents, TokenEvent
from ridgeline.core.plan.step import Finish, RowKind, StepResult
from ridgeline.engine import masks
from ridgeline.engine.logprobs import NO_ENTRIES, row_entries
from ridgeline.engine.plan_builder import LOGPROBS, MASK, SCORED, InFlight
from ridgeline.engine.running import Running
from ridgeline.engine.sequence import NO_SLOT, Sequence, Status

REASONS = (None, "stop", "length", None)  # by `Finish` code
NOT_NUMBERS = "the model's scores are not numbers (NaN): its weights are damaged, or its dtype overflows."


class End(Protocol):
    def __call__(self, seq: Sequence, *, stopped: bool = False) -> None:
        """End a request. stopped: the device has ended it already."""


class Results:
    """unsent: ends of requests that no result brought; they are returned with the next one. drafts: as in `Figures`."""

    def __init__(
        self,
        running: Running,
        suspects: dict[Sequence, None],
        end: End,
        preempt: Callable[[Sequence, Preemption], None],
    ) -> None:
        self.unsent: list[TokenEvent] = []
        self.drafts = Counter({"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0})
        self._running, self._suspects = running, suspects
        self._finish, self._preempt = end, preempt

    def accept(self, record: InFlight, result: StepResult, later: PySequence[InFlight], newest: int) -> StepEvents:
        """Append the accepted tokens and tell of them. The one loop over all rows of a step: it does little per row.

        later: the plans in flight behind it; newest: the id of the newest one that was made."""
        tokens_KR, finish_R, rows = result.tokens_RK.T.tolist(), result.finish_R, record.plan.rows
        if not rows.guided and not rows.features & (LOGPROBS | SCORED) and len(tokens_KR) == 1:
            events = self._hand_out(record, tokens_KR[0], result)
        else:
            if rows.guided:
                finish_R = _hand_over(record, tokens_KR, finish_R)
            events = self._take(record, result, tokens_KR, finish_R)
        if result.pooled:
            events.events[:0] = self._vectors(record, result)  # before the end of one that draws tokens too
        if result.drafted_R is not None:
            self._count_drafts(result.drafted_R, result.emitted_R)
        if record.verifies:
            self._note_verified(record, result.emitted_R, later, newest)
        self._settle(record, result.emitted_R, tokens_KR, finish_R)
        if self._running.drafting is not None:
            self._running.learn(self._running.drafting, record, result)
        return events

    def _count_drafts(self, drafted_R: np.ndarray, emitted_R: np.ndarray) -> None:
        """Count the drafts of a step. A row emits one token more than it had right drafts, unless one ended it."""
        verified_R = drafted_R > 0
        right_R = np.maximum(emitted_R[verified_R] - 1, 0)
        self.drafts["drafts"] += int(verified_R.sum())
        self.drafts["draft_tokens"] += int(drafted_R.sum())
        self.drafts["accepted_tokens"] += int(right_R.sum())
        for place in range(int(right_R.max(initial=0))):
            self.drafts[f"accepted_tokens_per_pos: {place}"] += int((right_R > place).sum())

    def _vectors(self, record: InFlight, result: StepResult) -> Iterator[TokenEvent]:
        """Yield the ends of requests that are pooled, unless their vectors are no numbers, and what else rows found."""
        for row, vector in result.pooled.items():
            seq = record.seqs[row]
            if seq.request.task is None:
                yield TokenEvent(seq.id, -1, None, vector=vector)
            elif seq.status is not Status.FINISHED and result.finish_R[row] == Finish.STOP:
                seq.has_emitted, seq.first_token = True, self._running.clock()
                yield TokenEvent(seq.id, -1, "stop", vector=vector)

    def _hand_out(self, record: InFlight, tokens_R: list[int], result: StepResult) -> StepEvents:
        """Append one token to each row that has one, where no row reports anything else. Where they go is known of the
        standing rows."""
        seqs, standing, events = record.seqs, record.standing, StepEvents()
        ended, others = result.finish_R.nonzero()[0].tolist(), seqs[len(standing.seqs) :]
        lists, events.ids, events.token_ids = standing.tokens, standing.ids.copy(), tokens_R
        if others:
            lists = [*lists, *(seq.tokens for seq in others)]
            events.ids += [seq.id for seq in others]
        finished = self._running.finished_since(record.departures)
        for row in ended:
            seq, token = seqs[row], tokens_R[row]
            if token >= 0 and seq.status is not Status.FINISHED:
                seq.tokens.append(token)
                events.events.append(TokenEvent(seq.id, token, REASONS[result.finish_R[row]]))
        emitted = np.count_nonzero(result.emitted_R)
        if ended or finished or emitted < len(seqs):
            lists, events.token_ids = lists.copy(), tokens_R.copy()
            none = set(ended)
            if emitted < len(seqs):
                none.update((result.emitted_R == 0).nonzero()[0].tolist())
            none.update(seqs.index(seq) for seq in finished if seq in seqs)
            for row in sorted(none, reverse=True):
                del lists[row], events.ids[row], events.token_ids[row]
        any(map(list.append, lists, events.token_ids))  # a loop of the interpreter's own: it takes a third of the time
        return events

    def _take(
        self, record: InFlight, result: StepResult, tokens_KR: list[list[int]], finish_R: np.ndarray
    ) -> StepEvents:
        """Append the accepted tokens, row by row, and tell of what happened to each."""
        events, finished = StepEvents(), Status.FINISHED
        for k, tokens_R in enumerate(tokens_KR):  # one column, unless rows verify drafts
            ends_R = finish_R if len(tokens_KR) == 1 else finish_R * (np.maximum(result.emitted_R, 1) == k + 1)
            for seq, token, finish, entries in zip(  # noqa: B905
                record.seqs, tokens_R, ends_R.tolist(), row_entries(record, result, k)
            ):
                if seq.status is finished or (token < 0 and entries[1] is None):
                    continue
                if token >= 0:
                    seq.tokens.append(token)
                if finish or entries is not NO_ENTRIES:
                    events.events.append(TokenEvent(seq.id, token, REASONS[finish], *entries))
                else:
                    events.ids.append(seq.id)
                    events.token_ids.append(token)
        return events

    def _settle(
        self, record: InFlight, emitted_R: np.ndarray, tokens_KR: list[list[int]], finish_R: np.ndarray
    ) -> None:
        """Do what follows from a plan's tokens for the few rows to which something happened."""
        seqs, plan, block_size = record.seqs, record.plan, self._running.cache.block_size
        full_R = record.ends_R % block_size == 0  # a block is full, and its keys are written
        if record.verifies:
            full_R &= plan.rows.kinds_R != RowKind.VERIFY
        full = full_R.nonzero()[0]
        filled = [(seqs[row], end) for row, end in zip(full.tolist(), record.ends_R[full].tolist(), strict=True)]
        filled = [each for each in filled if each[0].slot != NO_SLOT]
        if filled:
            self._running.cache.published.publish_filled(*zip(*filled, strict=True))
        for seq in [seqs[span.row] for span in plan.spans if emitted_R[span.row]]:
            seq.has_emitted, seq.first_token = True, seq.first_token or self._running.clock()
            self._suspects.pop(seq, None)
        ended = finish_R.nonzero()[0].tolist()
        for row in sorted(
            ended, key=lambda row: finish_R[row] == Finish.NAN
        ):  # what others leave behind they take back
            if finish_R[row] == Finish.NAN:
                self._distrust(seqs[row])
            elif seqs[row].status is not Status.FINISHED:
                self._finish(seqs[row], stopped=True)
        if plan.rows.features & MASK:
            for tokens_R in tokens_KR:
                for seq, token in zip(seqs, tokens_R, strict=True):
                    masks.accept(seq, token, self.fail)

    def _note_verified(self, record: InFlight, emitted_R: np.ndarray, later: PySequence[InFlight], newest: int) -> None:
        """Publish what rows verified, and take back what they did not emit of what they might have, in later plans as
        well: a request that seemed to have ended by it goes on."""
        rows, kv_len, last_kv_len = record.plan.rows, self._running.slots.kv_len, self._running.slots.last_kv_len
        seqs, block_size = record.seqs, self._running.cache.block_size
        verify_R = (rows.kinds_R == RowKind.VERIFY).nonzero()[0]
        here_R = verify_R[[seqs[row].slot != NO_SLOT for row in verify_R.tolist()]]
        # The keys of a row's newest token are not written yet
        written_R = np.array([len(seqs[row].tokens) - 1 for row in here_R.tolist()], np.int64)
        filled_R = written_R // block_size > (written_R - emitted_R[here_R]) // block_size
        for row, written in zip(here_R[filled_R].tolist(), written_R[filled_R].tolist(), strict=True):
            self._running.cache.published.publish(seqs[row], written)
        slots_R = rows.slots_R[here_R]
        short_S = np.zeros_like(kv_len)
        short_S[slots_R] = rows.num_logits_R[here_R] - emitted_R[here_R]
        kv_len[slots_R] -= short_S[slots_R]
        for row in here_R[kv_len[slots_R] < last_kv_len[slots_R]].tolist():
            if seqs[row] not in self._running.decoding:
                self._running.begin_decoding(seqs[row], newest)
        for behind in later:
            behind.ends_R = behind.ends_R - short_S[behind.plan.rows.slots_R]

    def _distrust(self, seq: Sequence) -> None:
        """A request's scores were no numbers. No request may match what it, or a request it shares with, has in the
        cache; it starts over with blocks of its own, once."""
        if not seq.distrusted:  # since then it has shared nothing
            self._running.cache.published.withdraw(*seq.members)
            self._running.cache.sounds.forget(*seq.members)
        if seq.status is Status.FINISHED:
            return
        if seq.distrusted:
            self.fail(seq, NOT_NUMBERS)
            return
        seq.distrusted = True
        seq.make_private()
        if seq.slot != NO_SLOT:
            self._preempt(seq, Preemption.NOT_NUMBERS)

    def fail(self, seq: Sequence, error: str) -> None:
        """End one request with an error, told with the next result."""
        self._finish(seq)
        self.unsent.append(TokenEvent(seq.request.id, -1, "error", error=error))


def _hand_over(record: InFlight, tokens_KR: list[list[int]], finish_R: np.ndarray) -> np.ndarray:
    """Append their tokens to companions, then take them out of the lists: they are not reported. Returns finish_R
    without theirs."""
    finish_R = finish_R.copy()
    for _, row, _ in record.plan.rows.guided:
        for tokens_R in tokens_KR:
            if tokens_R[row] >= 0:
                record.seqs[row].tokens.append(tokens_R[row])
                record.seqs[row].has_emitted = True
            tokens_R[row] = -1
        finish_R[row] = Finish.NONE
    return finish_R
