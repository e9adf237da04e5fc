"""A clock that stands still until it is set."""

from __future__ import annotations


class VirtualClock:
    """now: seconds since the start of the simulation. It never goes back."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Go on to a moment. One that has passed already is an error of the simulation."""
        assert to >= self.now, f"the clock stands at {self.now} and cannot go back to {to}"
        self.now = to
