"""The number of drafts that all rows of a step verify, where a step has one shape: in a captured graph.

Some numbers have graphs: the widths (`core.settings.speculation.verified_widths`). A step of a width w takes T(w)
seconds, and a row of it brings E(w) = 1 + p₁ + … + p_w tokens, where pᵢ is the probability that the first i drafts are
right. For each range of the number of rows the width with the highest E(w) / T(w) is taken; no drafts (w = 0) is one of
the choices.

E is known for all widths as soon as drafts are tried: what is learned of a place holds for every width that reaches it,
and a place that was not tried is judged by those that were. So only times have to be measured, each in a few steps. A
time that is not known has two bounds: a step takes no less than one that verifies less, and no less for a token than
one that verifies more. A width is tried only if it would be the best one by these bounds, the narrowest first. Shares
that few rows have shown are uncertain, so their upper estimates are used.

From time to time all times but that of the width in use are forgotten. A width is measured again only if it may be the
best one. Where drafts are off, the narrowest width is then tried in any case, since only a trial shows if drafts have
become better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as PySequence
from math import sqrt
from statistics import median

import numpy as np

from ridgeline.core.plan.step import Feature, RowKind, StepResult
from ridgeline.core.settings.speculation import MOST_VERIFIED, verified_widths
from ridgeline.engine.plan_builder import InFlight
from ridgeline.engine.row_drafting import BURSTS, HOPE, LONG, LONGEST, SHORT
from ridgeline.engine.sequence import Sequence

WINDOW = 256  # trials of a place that its share of right drafts is taken of, more or less
LEAST_KEPT = 0.9  # of the weight of earlier trials after a step, however many rows it has
PRIOR = 4.0  # trials that the share of all places counts for in that of one
DOUBTED = 4.0  # trials that all earlier ones count for where drafts were off meanwhile
BATCH = 24  # trials after which it is asked whether the shares still hold
UNLIKELY = 12.0  # times the variance of a batch's right drafts: from there on the square of their surprise is no chance
HOPEFUL = 2.0  # standard deviations by which shares may be higher than they seem
SLACK = 0.02  # the gain from which on another width is taken or tried
STEEP = 0.5  # of the slope between two widths that wider ones are taken to have at least
BEGINS = 3  # trials whose beginnings are compared
LOSS = 0.01  # of the time until the next trials, at most, may be lost by these


class Shares:
    """The shares of right drafts by place, of the rows that reach it. A row reaches a place if its step verifies so
    many drafts, and all before are right. A draft that is not there is not right."""

    def __init__(self, places: int) -> None:
        self._reached, self._right = np.zeros(places), np.zeros(places)
        self._batch = np.zeros(3)  # trials, right drafts beyond those that were expected, and the variance of these

    def note(self, emitted_R: np.ndarray, width: int) -> None:
        """Learn from a step with so many drafts a row. Rows that emitted nothing were over before."""
        emitted_R = emitted_R[emitted_R > 0]
        width = min(width, len(self._right))
        if not width or not len(emitted_R):
            return
        counts = np.bincount(np.minimum(emitted_R, width + 1) - 1, minlength=width + 1)
        there = counts[::-1].cumsum()[::-1]  # rows with at least so many right drafts
        self._expect(there[:-1], there[1:])
        kept = max(LEAST_KEPT, 1 - len(emitted_R) / WINDOW)
        self._reached *= kept  # of all places: what a narrow step does not try fades
        self._right *= kept
        self._reached[:width] += there[:-1]
        self._right[:width] += there[1:]

    def _expect(self, reached: np.ndarray, right: np.ndarray) -> None:
        """Doubt earlier trials if those of a batch turn out too unlike them."""
        share = self._share()[: len(reached)]
        expected = reached * share
        self._batch += reached.sum(), (right - expected).sum(), (expected * (1 - share)).sum()
        trials, surprise, variance = self._batch
        if trials < BATCH:
            return
        if surprise * surprise > UNLIKELY * variance:
            self.doubt()
        self._batch[:] = 0

    def doubt(self) -> None:
        """Let earlier trials count for little beside those that come."""
        scale = min(1.0, DOUBTED / max(self._reached[0], DOUBTED))
        self._reached *= scale
        self._right *= scale

    def _share(self) -> np.ndarray:
        among_all = (self._right.sum() + HOPE) / (self._reached.sum() + 1)
        return (self._right + PRIOR * among_all) / (self._reached + PRIOR)

    def tokens(self, width: int, deviations: float = 0.0) -> float:
        """Return the mean number of tokens that a row with so many drafts emits, if the shares are higher than they
        seem by so many standard deviations of that of all places."""
        reached, right = self._reached.sum(), self._right.sum()
        higher = deviations * sqrt(right * (1 - right / max(1.0, reached))) / (reached + PRIOR)
        return 1 + float(np.minimum(1, self._share()[:width] + higher).cumprod().sum())


class StepWay:
    """The choice for steps of about as many rows.

    width: that of the next steps. best: that of the steps between trials. widths: those that there are, from the
    narrowest on; 0: none. trial: how many steps a trial with drafts has.
    """

    def __init__(self, widths: PySequence[int], shares: Shares, first: int, trial: int = SHORT) -> None:
        self.width, self.best = first, first
        self._widths, self._shares, self._trial = widths, shares, trial
        self._seconds: dict[int, deque[float]] = {}
        self._left, self._rest, self._long = self._length(first), 0, LONG // 2
        self._former: int | None = first  # the best one before the trials under way; None: there are no trials
        self._tried: list[int] = []  # widths of steps since trials began
        # Seconds of the first step with drafts of the last trials: before it a network runs over what waited. The least
        # counts, since other work on a machine makes steps longer
        self._begins = deque[float](maxlen=BEGINS)
        self._plain_rate = 0.0

    def saved(self, emitted: int, seconds: float) -> float:
        """Return the seconds that a step which verified drafts has saved: steps without them would have taken so much
        longer for as many tokens. 0 if there were none yet."""
        return emitted / self._plain_rate - seconds if self._plain_rate else 0.0

    def note(self, width: int, rows: int, emitted: int, seconds: float) -> None:
        """Learn from a step, and choose the width of the next one."""
        self._seconds.setdefault(width, deque(maxlen=SHORT)).append(seconds)
        if not width:
            self._plain_rate = emitted / median(self._seconds[0])
        if self._former is not None:
            if width and not self._former and not any(self._tried):
                self._begins.append(seconds)
            self._tried.append(width)
        if width != self.fitting(rows):
            return  # planned before the last choice, or beside rows that cannot verify
        self._left -= 1
        self._rest -= self._former is None
        if self._left > 0:
            return
        fitting = [0, *(each for each in self._widths if rows * (1 + each) <= MOST_VERIFIED)]
        if self._rest <= 0 and self._former is None and len(fitting) > 1:
            self._look_again(fitting)
        else:
            self._choose(fitting)
        self._left = self._length(self.width)

    def fitting(self, rows: int) -> int:
        """Return the width of the next steps, or the next narrower one for which there are not too many rows."""
        most = min(self.width, MOST_VERIFIED // rows - 1)
        return max((each for each in self._widths if each <= most), default=0)

    def _length(self, width: int) -> int:
        return self._trial if width else SHORT

    def _look_again(self, fitting: PySequence[int]) -> None:
        """Forget the times of other widths, and begin to try them."""
        self._seconds = {self.best: self._seconds[self.best]} if self.best in self._seconds else {}
        self._former = self.best
        self.width = 0 if self.best else fitting[1]
        if not self.best:
            self._shares.doubt()

    def _choose(self, fitting: PySequence[int]) -> None:
        """Take the best width, or try one that might be better."""
        rates = {width: self._shares.tokens(width) / self._least(width) for width in fitting}
        known = {width: rate for width, rate in rates.items() if width in self._seconds}
        best = max(known, key=lambda width: known[width] * (1 + SLACK * (width == self.best)))
        hopeful = [
            width
            for width in fitting
            if width not in known
            and self._shares.tokens(width, HOPEFUL) / self._least(width) > known[best] * (1 + SLACK)
        ]
        if hopeful:
            if self._former is None:
                self._former = self.best
            self.best, self.width = best, hopeful[0]
            return
        if self._former is not None:
            self._long = min(2 * self._long, LONGEST) if best == self._former else LONG
            lost = sum(self._least(width) - self._shares.tokens(width) / known[best] for width in self._tried)
            lost += self._beginning(best)
            self._rest = max(self._long, int(lost / (LOSS * self._least(best))))
            self._former, self._tried = None, []
        self.best = self.width = best

    def _beginning(self, best: int) -> float:
        """Return the seconds that trials lose before their first step, no more than those of a trial's plain steps."""
        if best or not self._begins or not any(self._tried):
            return 0.0  # with drafts on no tokens wait
        first = next(width for width in self._tried if width)
        return min(max(0.0, min(self._begins) - self._least(first)), SHORT * self._least(best))

    def _least(self, width: int) -> float:
        """Return the seconds of a step of this width, or the most that they are known to exceed."""
        seconds = {each: _usual(times) for each, times in sorted(self._seconds.items())}
        if width in seconds:
            return seconds[width]
        bounds = [time * min(1.0, (1 + width) / (1 + each)) for each, time in seconds.items()]
        narrower = [each for each in seconds if 0 < each < width][-2:]
        if len(narrower) == 2:
            one, two = narrower
            bounds.append(seconds[two] + STEEP * (seconds[two] - seconds[one]) * (width - two) / (two - one))
        return max(bounds)


def _usual(times: PySequence[float]) -> float:
    """Return the second shortest of six times: other work on a machine makes steps longer and never shorter."""
    return sorted(times)[len(times) // 4]


class StepDrafting:
    """Chooses for all rows of a step. most: the widest width. depth: that of the tree that drafts form, of which rows
    verify all or nothing; None: they form a chain."""

    def __init__(self, most: int, *, depth: int | None = None) -> None:
        self._most, self._widths = most, verified_widths(most, whole=depth is not None)
        self._shares = {masked: Shares(most if depth is None else depth) for masked in (False, True)}
        self._ways: dict[tuple[int, bool], StepWay] = {}  # by the bits of a number of rows, and whether some have masks
        self._newest = self._widths[0]  # the best width of the steps that ran last
        self._drafted = 0  # drafts of a row of the step before, or the most if others ran beside
        self.saved = 0.0  # seconds

    def wanted(self, seq: Sequence) -> int:
        """Return the most drafts that the request's rows may verify."""
        return self._most if seq.guessable else 0

    def width(self, rows: int, *, masked: bool) -> int:
        """Return the number of drafts that each of so many rows should verify. masked: some of them have token
        masks."""
        return self._way(rows, masked).fitting(rows)

    def _way(self, rows: int, masked: bool) -> StepWay:
        key = rows.bit_length(), masked
        if key not in self._ways:
            trial = BURSTS if masked else SHORT
            self._ways[key] = StepWay(self._widths, self._shares[masked], self._newest, trial)
        return self._ways[key]

    def note(self, record: InFlight, result: StepResult, seconds: float) -> bool:
        """Learn from a step, whose result came so many seconds behind the one before. Return True if steps of as many
        rows have another width now."""
        rows, masked = record.plan.rows, bool(record.plan.rows.features & Feature.MASK)
        width = rows.tokens_each - 1 if record.verifies else 0
        # A network that drafts has made as many drafts as the step before verified. Those that lack because of a
        # choice tell nothing. But where others run beside now and then, what is behind such steps is what there is
        self._shares[masked].note(result.emitted_R, min(width, self._drafted))
        alone = not (rows.kinds_R == RowKind.CHUNK).any() and all(seq.drafts for seq in record.seqs)
        self._drafted = width if alone else self._most
        if result.elapsed <= 0 or (rows.kinds_R == RowKind.CHUNK).any():
            return False
        emitted, way = int(result.emitted_R.sum()), self._way(len(rows), masked)
        seconds = max(seconds, result.elapsed) if masked else result.elapsed
        if record.verifies:
            self.saved += way.saved(emitted, seconds)
        before = way.width
        way.note(width, len(rows), emitted, seconds)
        self._newest = way.best
        return way.width != before
