"""The resolved settings of the cache's tier in the host's memory, and of what is kept for sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Preempted = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class HostTierSettings:
    """pages: of the host's memory, and one that is never used. bytes_per_second: at which blocks travel.
    staging_bytes: the bytes of evicted blocks that may be on their way to the host at once; more are not saved
    (`core.specs.host_layout.staging_bytes`).
    preempted: what becomes of a preempted request's blocks that the device gives up. "auto": they are saved, and come
    back, where that takes less time than running their tokens again. "recompute": they are not saved, and the request
    loads none. "swap": they are saved, and come back whatever that takes.
    """

    pages: int
    bytes_per_second: float
    staging_bytes: int
    preempted: Preempted = "auto"


@dataclass(frozen=True, kw_only=True)
class SessionBounds:
    """The bounds of sessions that are expected back. ttl: seconds for which one is kept at most. share: of each
    memory's pages, for the sessions of one client."""

    ttl: float = 3600.0
    share: float = 0.25
