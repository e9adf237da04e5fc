"""First come, first served, for each owner. Background requests are preempted for all others."""

from __future__ import annotations

from operator import attrgetter

from ridgeline.engine.policy.ranked import Ranked


class FCFS(Ranked):
    rank = attrgetter("background")
