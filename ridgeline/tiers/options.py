"""The settings of the disk tier, and its figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """eviction: lru, lfu or cost (`eviction`). tenant_bytes: the most bytes of one tenant (None: no bound).
    ttl: seconds after which a block is deleted (0: never). queue_bytes: of writes that wait. segment_bytes: of a file.
    period: seconds between two looks at the directory and at what has expired; 0: only `tick` looks.
    retry: seconds after which a full disk is written to again.
    """

    eviction: str = "lru"
    tenant_bytes: int | None = None
    ttl: float = 0.0
    queue_bytes: int = 256 << 20
    segment_bytes: int = 256 << 20
    readers: int = 4
    writers: int = 2
    period: float = 5.0
    retry: float = 30.0


@dataclass(kw_only=True)
class DiskFigures:
    """The store's figures: what is there now, and counts since it was opened.

    blocks, bytes: of all that can be read, those of other processes included. own_bytes: of this process's files.
    dropped: writes that found the queue full. refused: those while the disk was full, and blocks larger than the store.
    corrupt: blocks or files whose checksum was wrong. failed: reads and writes for which the system gave an error.
    stopped: writes have stopped since the disk is full. write_seconds, read_seconds: that threads spent on blocks.
    """

    blocks: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    own_bytes: int = 0
    owners: int = 1
    tenants: int = 0
    queued_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    missed: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0
    refused: int = 0
    corrupt: int = 0
    failed: int = 0
    stopped: bool = False
    write_seconds: float = 0.0
    read_seconds: float = 0.0
