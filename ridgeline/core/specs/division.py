"""The ranks between which a part of a model is divided, as the specs of its layers ask them."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig


class Ranks(NamedTuple):
    """A number of ranks, and the name of the option that sets it."""

    number: int
    named: str

    def part(self, what: str, size: int) -> int:
        """Return the size of a rank's part. Raise InvalidConfig if they do not divide it equally."""
        if size % self.number:
            raise InvalidConfig(
                f"{self.named} {self.number} does not divide the model's {size} {what}; choose another number."
            )
        return size // self.number

    def part_or_copy(self, what: str, size: int) -> int:
        """Return the size of a rank's part, or 1 if there are fewer than ranks, so that several ranks have the same
        one. Raise InvalidConfig if neither is equal for all."""
        return 1 if self.number % size == 0 else self.part(what, size)
