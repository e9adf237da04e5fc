"""Smaller `priority` first; within one priority first come, first served, for each owner."""

from __future__ import annotations

from operator import attrgetter

from ridgeline.engine.policy.ranked import Ranked


class Priority(Ranked):
    rank = attrgetter("priority")
