"""Drafts of a proposer that runs on the host, in the place of those of prompt lookup; and rows that verify all drafts,
whatever it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from ridgeline import LLM
from ridgeline.worker.runner import Runner
from ridgeline.worker.speculation.lookup import Lookup

Propose = Callable[[np.ndarray, int], np.ndarray]  # (known tokens, most drafts) → drafts


def tell(runner: Runner, propose: Propose) -> None:
    """Let the drafts of a runner on a CPU be those of `propose`."""
    lookup, slots = runner.proposer, runner.slots
    assert isinstance(lookup, Lookup)
    by_lookup = type(lookup).note

    def note(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
        by_lookup(lookup, out_token_RK, slots_R, *others)
        for row in (out_token_RK[:, 0] >= 0).nonzero()[:, 0].tolist():
            slot = int(slots_R[row])
            known = int(slots.kv_len_S[slot]) + 1
            room = 0 if slots.stopped_S[slot] else max(0, int(slots.max_len_S[slot]) - known - 1)
            drafts = lookup.drafts_SD[slot].fill_(-1).numpy()
            found = propose(lookup.text_SN[slot, :known].numpy(), len(drafts))[:room]
            drafts[: len(found)] = found

    lookup.note = note  # type: ignore[method-assign]


class Always:
    """Rows verify as many drafts as they may, whatever it costs."""

    saved = 0.0

    def __init__(self, most: int) -> None:
        self._most = most

    def wanted(self, seq: Any) -> int:
        return self._most if seq.guessable else 0

    def width(self, rows: int, *, masked: bool) -> int:
        return self._most

    def note(self, record: object, result: object, seconds: float) -> bool:
        return False


@contextmanager
def always_verified(llm: LLM) -> Iterator[list[int]]:
    """Let all rows verify as many drafts as they may. Yield a list that gets the number of tokens which each row
    emitted whose drafts were not cut."""
    scheduler, emitted = llm.assembly.engine.scheduler, list[int]()
    running, results = scheduler.running, scheduler._results
    drafting, count_drafts, most = running.drafting, results._count_drafts, running.each - 1

    def count(drafted_R: np.ndarray, emitted_R: np.ndarray) -> None:
        emitted.extend(emitted_R[drafted_R == most].tolist())
        count_drafts(drafted_R, emitted_R)

    running.drafting = Always(most)  # type: ignore[assignment]
    results._count_drafts = count  # type: ignore[method-assign]
    try:
        yield emitted
    finally:
        running.drafting = drafting
        del results._count_drafts
