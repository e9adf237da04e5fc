"""Scheduling policies: one file each. A policy gives every request its place; the rest follows.

Requests get budget, slots and blocks in that order, and when blocks run out the running request with the last place is
preempted. Who waits has nothing taken from others for it, unless the policy says that it outranks them.
"""

from __future__ import annotations

from typing import Protocol

from ridgeline.core.registry import Registry
from ridgeline.core.request import Request


class Policy(Protocol):
    preempts: bool  # whether any request outranks another

    def order(self, request: Request, arrival_index: int) -> tuple:
        """Sort key: smaller is served first. Must differ between requests (end it with arrival_index)."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Return whether `running` is preempted where `waiting` could not start beside it."""


POLICIES = Registry(
    "scheduling policy",
    {
        "fcfs": "ridgeline.engine.policy.fcfs:FCFS",
        "priority": "ridgeline.engine.policy.priority:Priority",
    },
)
