"""The time that the ranks of a divided model waited for each other."""

from __future__ import annotations

from typing import NamedTuple


class RankWaits(NamedTuple):
    """A rank's waiting. Times are in seconds since the start.

    steps: the time of steps.
    waited: in collectives, for ranks that came later.
    caused: how long others waited for this one.
    share: waited ÷ steps, over the newest steps.
    """

    rank: int
    steps: float
    waited: float
    caused: float
    share: float
