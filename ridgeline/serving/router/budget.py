"""The bytes that all open requests hold, within one bound."""

from __future__ import annotations

from ridgeline.serving.errors import Unavailable


class RouterFull(Unavailable):
    code = "router_full"


class ByteBudget:
    """Bytes that may be held. used: those that are."""

    def __init__(self, most: int) -> None:
        self.most, self.used, self.refused = most, 0, 0

    def take(self, size: int) -> None:
        """Take so many bytes. Raise RouterFull if there are not that many left."""
        if self.used + size > self.most:
            self.refused += 1
            raise RouterFull(
                f"the router holds {self.used} of at most {self.most} bytes of requests (--max-buffered-bytes); try "
                "again soon.",
                retry_after=1,
            )
        self.used += size

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.used -= size
