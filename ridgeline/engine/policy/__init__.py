"""Scheduling policies: one file each. A policy gives every request its place; the rest follows.

Requests are admitted in that order, and when blocks run out the running request with the last place is preempted.
"""

from __future__ import annotations

from typing import Protocol

from ridgeline.core.registry import Registry
from ridgeline.core.request import Request


class Policy(Protocol):
    def order(self, request: Request, arrival_index: int) -> tuple:
        """Sort key: smaller is served first. Must differ between requests (end it with arrival_index)."""


POLICIES = Registry(
    "scheduling policy",
    {
        "fcfs": "ridgeline.engine.policy.fcfs:FCFS",
        "priority": "ridgeline.engine.policy.priority:Priority",
    },
)
