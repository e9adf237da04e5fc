"""First come, first served, for each owner. Work in the background, which nobody waits for, gives way to all other."""

from __future__ import annotations

from operator import attrgetter

from ridgeline.engine.policy.ranked import Ranked


class FCFS(Ranked):
    rank = attrgetter("background")
