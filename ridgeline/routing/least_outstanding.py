"""The replica with the fewest open requests; of equal ones, the one that was chosen longest ago."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.routing import ServerLoad


class LeastOutstanding:
    def __init__(self) -> None:
        self._turns: dict[int, int] = {}  # when each was last chosen
        self._turn = 0

    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return the replica with the fewest open requests."""
        chosen = min(loads, key=lambda replica: (loads[replica].requests, self._turns.get(replica, 0), replica))
        self._turn += 1
        self._turns[chosen] = self._turn
        return chosen

    def forget(self, replica: int) -> None: ...
