"""Routing rules: one file each. A rule chooses the replica of a request, among those that can take one.

A rule knows replicas by number, and what is known of each at the moment of the choice (`ServerLoad`). It decides at
once, asks no replica and reads no clock, so a router of live servers and a simulation can use the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ridgeline.core.registry import Registry


class ServerLoad(NamedTuple):
    """The open work of a replica. requests: those that have not ended. tokens: of their prompts and outputs at most."""

    requests: int
    tokens: int


class RoutingRule(Protocol):
    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return the replica for a prompt, and take note of it.

        prompt: token ids, or the text's bytes where they are not known; one rule gets one kind.
        salt: prompts with unequal salts share nothing.
        loads: of the replicas that can take a request, at least one.
        session: the name of the conversation that the request belongs to, "" where it is unknown.
        """

    def forget(self, replica: int) -> None:
        """Forget what a replica has cached: it begins anew."""


@runtime_checkable
class KnowsRoom(Protocol):
    """A rule that keeps what replicas have cached, and can make use of how much that is."""

    def bound(self, replica: int, room: int | None) -> None:
        """Take note that a replica's cache holds `room` tokens; None: that is not known."""


RULES = Registry(
    "routing rule",
    {
        "prefix": "ridgeline.routing.prefix:Prefix",
        "least": "ridgeline.routing.least_outstanding:LeastOutstanding",
        "round-robin": "ridgeline.routing.round_robin:RoundRobin",
        "random": "ridgeline.routing.random_choice:RandomChoice",
        "session": "ridgeline.routing.session:Session",
    },
)

# sglang-router's names. Of two replicas drawn at random it takes the less loaded one; all loads are known here.
THEIRS = {"cache_aware": "prefix", "power_of_two": "least", "round_robin": "round-robin"}


def rule_of(name: str) -> RoutingRule:
    """Return a new rule by its name, or by sglang-router's. Raise InvalidConfig for an unknown name."""
    made: RoutingRule = RULES[THEIRS.get(name, name)]()
    return made
