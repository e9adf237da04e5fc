"""First come, first served, for each owner. Work in the background, which nobody waits for, gives way to all other."""

from __future__ import annotations

from ridgeline.core.request import Request
from ridgeline.engine.policy.ranked import Ranked


class FCFS(Ranked):
    def rank(self, request: Request) -> int:
        return int(request.background)
