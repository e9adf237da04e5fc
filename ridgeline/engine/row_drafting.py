"""The number of drafts that a request's next row verifies, where rows of a step may differ.

A draft is worth its place in a step if it brings tokens faster than the step does without it. The i-th draft of a row
is right with probability aⁱ, where a is the share of right drafts among those that were tried, and it lengthens the
step by b seconds. Steps bring r tokens a second. So drafts are added as long as aⁱ ≥ b · r, which makes the rate of
all rows together the highest (Dinkelbach's condition for a quotient of sums). A tree of drafts is verified whole or
not at all: aⁱ is then the probability that some draft of depth i is right, and n drafts are worth their places if
a + a² + … ≥ n · b · r.

All three are learned while requests run: a for each request, beginning with that of all; b and r from the times of
steps without prompts.

A step that verifies drafts may have a further cost that does not depend on their number. So for each range of rows the
rates with and without drafts are compared as well. From time to time the slower way is taken for a few steps, to see if
it is still slower. If rows have token masks, a step's time is the time from the result before to its own result: drafts
of such rows make the device wait for the host, and the device's own clock does not show that.
"""

from __future__ import annotations

from collections import deque
from math import ceil, log
from statistics import median

import numpy as np

from ridgeline.core.plan.step import Feature, RowKind, StepResult
from ridgeline.engine.plan_builder import InFlight
from ridgeline.engine.sequence import Sequence

KEPT = 0.98  # of a step's weight is left after another one
TRIALS_KEPT = 0.9  # of the weight of a request's trials after another row of it
PRIOR = 2.0  # trials that those of all requests count for in one's share
HOPE = 0.8  # the share of right drafts before any was tried
SHORT = 6  # steps that go the slower way, to see if it still is
BURSTS = 24  # of them with drafts where rows have masks: what grammars force comes in bursts, which a few steps miss
LONG, LONGEST = 64, 512  # steps that go the faster one before; so many more each time that it stays the faster one
NEWEST = 24  # steps that a rate is taken of: the last four trials
MARGIN = 1.03  # drafts pay if their rate is so many times that without: prompts cost more with them, and trials do
CLIPPED = 3.0  # times the median of the steps' seconds, beyond which a step's count as disturbed by other work
LOSS = 0.01  # of the time until the next trial, at most, may be lost by this one
PROBE = 64  # tokens after which a request without drafts tries them again
UNKNOWN = 0.5  # the price of a draft before steps of unlike numbers of tokens were seen
CHEAPEST = 0.05  # a draft costs something, even where the times of few steps say that it does not
SPREAD = 0.02  # the least variance of the steps' tokens, relative to their mean squared, from which b is learned


class StepTimes:
    """The line seconds = a + b * tokens through recent steps, by least squares with weights that fade."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weights, tokens, tokens², seconds, tokens * seconds
        self._emitted = 0.0
        self._slope: float | None = None

    def note(self, tokens: int, emitted: int, seconds: float) -> None:
        """Learn from a step of so many tokens that emitted so many."""
        self._sums = KEPT * self._sums + (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._emitted = KEPT * self._emitted + emitted
        x, xx, y, xy = self._sums[1:] / self._sums[0]
        if (variance := xx - x * x) > SPREAD * x * x:
            self._slope = min(max(0.0, (xy - x * y) / variance), y / x)

    @property
    def known(self) -> bool:
        """Return True if steps of different numbers of tokens were seen."""
        return self._slope is not None

    @property
    def price(self) -> float:
        """Return the number of tokens that steps emit in the time that one more token takes."""
        if self._slope is None:
            return UNKNOWN
        return max(CHEAPEST, self._slope * self._emitted / float(self._sums[3]))


class RowWay:
    """The choice between steps with drafts and without, for one range of the number of rows, and the rates of both.

    A rate is that of the newest steps which went a way: their tokens by their seconds, each counting up to three times
    the median, since a machine with other work to do makes single steps long. (In the median itself steps with more
    tokens, which take longer, would count too little.) The cost of a trial that did not pay, such as catching up before
    its first drafts, decides when the next one begins. trial: the number of steps that try drafts.
    """

    def __init__(self, trial: int = SHORT) -> None:
        self.drafts, self._trial = True, {False: SHORT, True: trial}
        self._steps = {
            way: deque[tuple[int, float]](maxlen=steps * NEWEST // SHORT) for way, steps in self._trial.items()
        }
        self._left, self._tries, self._long = trial, False, LONG
        self._plain_rate = 0.0
        self._spent = 0, 0.0  # tokens and seconds of a trial

    def saved(self, emitted: int, seconds: float) -> float:
        """Return the seconds that a step which verified drafts has saved: steps without them would have taken so much
        longer for as many tokens. 0 if there were none yet."""
        return emitted / self._plain_rate - seconds if self._plain_rate else 0.0

    def note(self, verified: bool, emitted: int, seconds: float) -> None:
        """Learn from a step that went one of the ways, and choose that of the next."""
        self._steps[verified].append((emitted, seconds))
        if not verified:
            self._plain_rate = self._rate(False)
        self._left -= 1
        if self._tries:
            self._spent = self._spent[0] + emitted, self._spent[1] + seconds
        if self._left > 0:
            return
        if not self._tries:
            self.drafts, self._left, self._tries = not self.drafts, self._trial[not self.drafts], True
            self._spent = 0, 0.0
            return
        before = not self.drafts
        self.drafts = self._rate(True) >= MARGIN * self._rate(False)
        self._long = min(2 * self._long, LONGEST) if self.drafts is before else LONG
        self._left, self._tries = max(self._long, self._steps_that_pay_for_a_trial(before)), False

    def _steps_that_pay_for_a_trial(self, way: bool) -> int:
        """Return the number of steps of a way beside which the loss of a trial of the other is small."""
        emitted, seconds = self._spent
        rate, steps = self._rate(way), self._steps[way]
        if self.drafts is not way or not rate:
            return 0
        lost = seconds - emitted / rate
        return max(0, ceil(lost / (LOSS * median(seconds for _, seconds in steps))))

    def _rate(self, verified: bool) -> float:
        steps = self._steps[verified]
        if not steps:
            return 0.0
        most = CLIPPED * median(seconds for _, seconds in steps)
        return sum(emitted for emitted, _ in steps) / sum(min(seconds, most) for _, seconds in steps)


class RowDrafting:
    """Chooses for each request. most: drafts of a row. depth: that of the tree that they form; None: they form a
    chain."""

    def __init__(self, most: int, *, depth: int | None = None) -> None:
        self._most, self._depth = most, depth
        self._times = StepTimes()
        self._right, self._tried = HOPE, 1.0
        self._ways: dict[tuple[int, bool], RowWay] = {}  # by the bits of a number of rows, and whether some have masks
        self.saved = 0.0  # seconds

    def width(self, rows: int, *, masked: bool) -> int:
        """Return the most drafts that a row should verify beside so many rows: none if steps of these should not
        verify any. masked: some of them have token masks."""
        way = self._ways.get((rows.bit_length(), masked))
        return self._most if way is None or way.drafts else 0

    def share(self, seq: Sequence) -> float:
        """Return the probability that a request's draft is right if those before it are, or that one of a tree's depth
        is."""
        right, tried = seq.trials
        return (right + PRIOR * self._right / self._tried) / (tried + PRIOR)

    def wanted(self, seq: Sequence) -> int:
        """Return the number of drafts that the request's next rows should verify."""
        if not seq.guessable:
            return 0
        price, share = self._times.price, self.share(seq)
        if self._depth is not None:
            right = sum(share**depth for depth in range(1, self._depth + 1))
            return self._most if right >= self._most * price or not self._times.known else 0
        if share < price or price >= 1:  # a share may have faded to 0
            return 0
        return self._most if share >= 1 else min(self._most, int(log(price) / log(share)))

    def note(self, record: InFlight, result: StepResult, seconds: float) -> bool:
        """Learn from a step, whose result came so many seconds behind the one before. Return True if some request has
        another number of drafts now (`Sequence.drafts`)."""
        drafted_R, rows = result.drafted_R, record.plan.rows
        turned, tokens = False, len(rows) + (0 if drafted_R is None else int(drafted_R.sum()))
        if result.elapsed > 0 and not (rows.kinds_R == RowKind.CHUNK).any():
            emitted = int(result.emitted_R.sum())
            self._times.note(tokens, emitted, result.elapsed)
            masked = bool(rows.features & Feature.MASK)
            key = len(rows).bit_length(), masked
            way = self._ways.setdefault(key, RowWay(BURSTS if masked else SHORT))
            seconds = max(seconds, result.elapsed) if masked else result.elapsed
            before = way.drafts
            if record.verifies:
                self.saved += way.saved(emitted, seconds)
            way.note(record.verifies, emitted, seconds)
            turned = before is not way.drafts
        tried = () if drafted_R is None else drafted_R.nonzero()[0].tolist()
        for row in tried:
            self._try(record.seqs[row], int(drafted_R[row]), int(result.emitted_R[row]))  # type: ignore[index]
        wanted = {seq: self.wanted(seq) for seq in (record.seqs[row] for row in tried)}
        for row in self._waiting(record):
            seq = record.seqs[row]
            seq.undrafted += int(result.emitted_R[row])
            if seq.undrafted >= PROBE:
                seq.trials, wanted[seq] = (
                    (seq.trials[0] / 2, seq.trials[1] / 2),
                    1 if self._depth is None else self._most,
                )
        changed = {seq: drafts for seq, drafts in wanted.items() if drafts != seq.drafts}
        for seq, drafts in changed.items():
            seq.drafts, seq.undrafted = drafts, 0
        return turned or bool(changed)

    def _waiting(self, record: InFlight) -> list[int]:
        """Return the rows of requests that have no drafts, and could."""
        return [
            row
            for row in (record.plan.rows.kinds_R == RowKind.TOKEN).nonzero()[0].tolist()
            if record.seqs[row].guessable and not record.seqs[row].drafts
        ]

    def _try(self, seq: Sequence, drafted: int, emitted: int) -> None:
        """Note how a row's drafts turned out: those up to the first wrong one were tried."""
        if not emitted:
            return
        most = drafted if self._depth is None else min(drafted, self._depth)
        right = min(most, emitted - 1)
        tried = min(most, right + 1)
        seq.trials = TRIALS_KEPT * seq.trials[0] + right, TRIALS_KEPT * seq.trials[1] + tried
        self._right, self._tried = KEPT * self._right + right, KEPT * self._tried + tried
