"""Smaller `priority` first; within one priority first come, first served, for each owner."""

from __future__ import annotations

from ridgeline.core.request import Request
from ridgeline.engine.policy.ranked import Ranked


class Priority(Ranked):
    def rank(self, request: Request) -> int:
        return request.priority
