"""Each replica in its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.routing import ServerLoad


class RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def choose(
        self, prompt: Sequence[int] | bytes, salt: str, loads: Mapping[int, ServerLoad], *, session: str = ""
    ) -> int:
        """Return the next replica by number after the one before."""
        self._last = min(loads, key=lambda replica: (replica <= self._last, replica))
        return self._last

    def forget(self, replica: int) -> None: ...
