"""Drafts that are never right cost less than 3 % of the time of plain decoding, whatever makes them.

The device is virtual: a step takes what a line says, for the tokens of the target, and a part of that for those of a
network that drafts. Both ways to choose are asked, from their first step on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from ridgeline.core.plan.step import StepPlan, StepResult
from ridgeline.engine.plan_builder import InFlight, Standing
from ridgeline.engine.row_drafting import RowDrafting
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable
from ridgeline.engine.step_drafting import StepDrafting
from ridgeline.worker.speculation.backlog import LONGEST
from tests.covering import by_pairs
from tests.engine.desk import make_request

MOST, STEPS, BOUND = 5, 2048, 1.03
Seconds = Callable[[int, bool], float]  # of a step of the target, by its tokens, and whether it verifies

DEVICES: dict[str, Seconds] = {
    "bound by memory": lambda tokens, verifies: 1 + 0.002 * tokens,
    "in between": lambda tokens, verifies: 1 + 0.02 * tokens,
    "bound by products": lambda tokens, verifies: 0.2 + 0.04 * tokens,
    "each token as long as a step": lambda tokens, verifies: float(tokens),
    "verifying costs more besides": lambda tokens, verifies: 1 + 0.01 * tokens + 2 * verifies,
}


class Network(NamedTuple):
    """A network that drafts. share: of the target's layers. passes: it makes one draft a pass, and not all in one.
    waits: tokens wait until drafts are wanted."""

    share: float = 0.0
    passes: bool = False
    waits: bool = False


PROPOSERS = {
    "prompt lookup, suffixes": Network(),
    "Medusa": Network(0.01),
    "DFlash": Network(0.1, waits=True),
    "EAGLE": Network(0.15, passes=True, waits=True),
    "a draft model": Network(0.2, passes=True, waits=True),
}


def cost(kind: type[RowDrafting | StepDrafting], rows: int, seconds: Seconds, network: Network) -> float:
    """Return the time of many steps with useless drafts, by that of plain ones."""
    drafting, slots, seqs = kind(MOST), SlotTable(rows), list[Sequence]()
    for n in range(rows):
        seqs.append(seq := Sequence(make_request(str(n), [1], max_tokens=9), 1))
        slots.acquire(seq, 1)
        seq.drafts = drafting.wanted(seq)
    flying, total, waiting = deque[tuple[InFlight, StepResult]](), 0.0, 0
    for number in range(STEPS):
        step = Standing.of(seqs, slots, drafts=drafting.width(rows, masked=False)).rows
        drafted_R = (step.num_tokens_R - 1).astype(np.int32)
        most = int(drafted_R.max())
        elapsed, waiting = seconds(int(step.num_tokens_R.sum()), most > 0), min(LONGEST, waiting + network.waits)
        if most:
            own = [waiting * rows, *([rows] * (most - 1) if network.passes else [rows * MOST])]
            elapsed += network.share * sum(seconds(tokens, False) for tokens in own if tokens)
            waiting = 0
        total += elapsed
        plan = StepPlan(id=number, rows=step, kv_bound_R=np.ones(rows, np.int32))
        result = StepResult(number, emitted_R=np.ones(rows, np.int32), drafted_R=drafted_R, elapsed=elapsed)
        flying.append((InFlight(plan, seqs, []), result))
        if len(flying) > 2:
            drafting.note(*flying.popleft(), 0.0)
    return total / (STEPS * seconds(rows, False))


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("kind", "proposer", "device", "rows"),
    by_pairs([RowDrafting, StepDrafting], [*PROPOSERS], [*DEVICES], [1, 8, 64]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_useless_drafts_cost_less_than_three_percent(
    kind: type[RowDrafting | StepDrafting], proposer: str, device: str, rows: int
) -> None:
    assert 1 <= cost(kind, rows, DEVICES[device], PROPOSERS[proposer]) <= BOUND
