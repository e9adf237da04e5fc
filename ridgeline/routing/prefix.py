"""The replica that has most of the prompt cached, unless it has too much to do (`core.plan.routing`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.core.plan.routing import Router
from ridgeline.routing import ServerLoad

MOST_REPLICAS = 1024


class Prefix:
    def __init__(self) -> None:
        self._router = Router(MOST_REPLICAS)

    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return the replica that is thought to have the longest beginning of the prompt."""
        return self._router.choose(prompt, salt, {replica: load.tokens for replica, load in loads.items()})

    def forget(self, replica: int) -> None:
        self._router.forget(replica)

    def bound(self, replica: int, room: int | None) -> None:
        self._router.bound(replica, room)
