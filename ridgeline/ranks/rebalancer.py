"""The leader's decisions about the experts that change ranks while the server runs.

After every `step_interval` steps it looks at the tokens that experts got in the newest `window_size` steps. If another
placement would lower the load of a layer's busiest rank by more than GAIN, experts move: a few slots between two steps,
until the placement is reached. A thread searches for placements, since that takes longer than a step.

Legend:
    L  mixtures
    E  experts
    R  ranks
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.settings.rebalancing import MOST, Rebalanced, Rebalancing
from ridgeline.perf.experts import imbalance
from ridgeline.perf.moves import near, takes
from ridgeline.perf.placement import placed, rank_loads
from ridgeline.ranks.messages import FromLeader, Look, Move

logger = logging.getLogger(__name__)

GAIN = 0.05  # of the busiest rank's tokens: what less would save is not worth a copy, and comes and goes by chance


@dataclass
class Asked:
    """A look that ranks were asked for. plans: of each rank, the one that brings its counts."""

    step: int
    plans: dict[int, int]


class Decision(NamedTuple):
    """The moves that a look led to, the placement behind them, and the busiest rank ÷ mean before and after."""

    moves: list[Move]
    placement: Placement
    before: float
    after: float


class Rebalancer:
    """Decides what a leader says to ranks between steps, so that all of them have equally much to do. It is called
    before every step, and told of every look at the experts' counts."""

    def __init__(self, settings: Rebalancing, placement: Placement) -> None:
        self._settings, self._placement = settings, placement
        self._moves: deque[Move] = deque()
        self._thread = ThreadPoolExecutor(1, "ridgeline-experts")
        self._deciding: Future[Decision] | None = None
        self._looks = self._moved = 0
        self._before = self._after = 1.0
        self.forget()

    def forget(self) -> None:
        """Count steps and tokens from here on."""
        self._step = 0
        self._asked: list[Asked] = []
        self._newest: dict[int, np.ndarray] = {}  # of each rank, its counts
        self._counts: dict[int, np.ndarray | None] = {0: None}  # step → all ranks' counts behind it; None: nothing

    @property
    def figures(self) -> Rebalanced:
        """The outcome so far, but for the bytes, which ranks count."""
        return Rebalanced(self._looks, self._moved, 0, self._before, self._after)

    def before_step(self, plans: Mapping[int, int]) -> list[FromLeader]:
        """Return the messages to all ranks before the next step. plans: the plan of each rank whose counts matter."""
        self._step += 1
        said: list[FromLeader] = []
        window, interval = self._settings.window_size, self._settings.step_interval
        if self._step % interval == 0 or (self._step + window) % interval == 0:
            self._asked.append(Asked(self._step, dict(plans)))
            said.append(Look())
        if self._deciding is not None and self._deciding.done():
            decided, self._deciding = self._deciding, None
            if (error := decided.exception()) is not None:  # no reason to stop serving
                logger.error("experts stay where they are until the next look", exc_info=error)
            else:
                self._take(decided.result())
        if self._moves:
            said.append(move := self._moves.popleft())
            self._moved += len(move.takes)
        return said

    def note(self, rank: int, plan_id: int, load: ExpertLoad) -> None:
        """Take a rank's counts behind a plan."""
        self._newest[rank] = load.total_LE
        for asked in self._asked:
            if rank in asked.plans and plan_id >= asked.plans[rank]:
                del asked.plans[rank]
        while self._asked and not self._asked[0].plans:
            self._counted(self._asked.pop(0).step)

    def shutdown(self) -> None:
        """Decide nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _counted(self, step: int) -> None:
        """All counts behind a step are there."""
        self._counts[step] = total_LE = np.sum(list(self._newest.values()), axis=0)
        first = max(0, step - self._settings.window_size)
        due = step % self._settings.step_interval == 0
        if due and first in self._counts and not self._moves and self._deciding is None:
            before_LE = self._counts[first]
            window_LE = total_LE if before_LE is None else total_LE - before_LE
            self._deciding = self._thread.submit(decide, window_LE, self._placement)
        if due:
            self._counts = {at: counts for at, counts in self._counts.items() if at >= first}

    def _take(self, decision: Decision) -> None:
        self._looks += 1
        self._moves.extend(decision.moves)
        self._placement, self._before, self._after = decision.placement, decision.before, decision.after
        if decision.moves:
            count = sum(len(move.takes) for move in decision.moves)
            logger.info(
                "%d experts change places: the busiest rank has %.2f times the mean, and %.2f times behind that",
                count,
                decision.before,
                decision.after,
            )


def decide(tokens_LE: np.ndarray, placement: Placement) -> Decision:
    """Return the experts to move if they get so many tokens. Layers without tokens stay as they are."""
    moves, new = [], list(placement)
    before, after = [], []
    for mixture, held in enumerate(placement):
        tokens_E = tokens_LE[mixture][: 1 + max(expert for own in held for expert in own)]
        if not tokens_E.any():
            continue
        now_R = then_R = rank_loads(tokens_E, held)
        wanted = placed(tokens_E, len(held), len(held[0]))
        if (wanted_R := rank_loads(tokens_E, wanted)).max() < (1 - GAIN) * now_R.max():
            new[mixture], then_R = near(held, wanted), wanted_R
            moves += [Move(mixture, order) for order in takes(held, new[mixture], MOST)]
        before.append(imbalance(now_R))
        after.append(imbalance(then_R))
    return Decision(moves, tuple(new), _mean(before), _mean(after))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 1.0
