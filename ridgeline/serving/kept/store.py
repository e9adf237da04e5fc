"""The answers that one API server keeps: bounded in number and bytes, each seen by its own client alone.

store = Store(most=1000, most_bytes=1 << 28)
store.add(record)
store.find(record.id, record.tenant)
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from ridgeline.serving.errors import Overloaded

RETRY_AFTER = 5  # seconds, when all that is kept still runs


class Log:
    """The events of an answer that is written in the background, for readers that may come at any time.

    `ended` means that no more will come, and `forgotten` that there was no room for them.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ended = self.forgotten = False
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait until something has changed, for at most so long."""
        waiting = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait({waiting}, timeout=seconds)
        waiting.cancel()


@dataclass
class Record:
    """An answer that is kept.

    tenant: the only client that may see it.
    owner: whose room it takes, as `owner.current()`.
    body: the answer as it is now, as JSON.
    turns: the conversation before it and the answer itself, each a list of items as JSON. Records share them.
    background: it is or was written without a client that waits.
    task: what still writes it.
    log: its events, if they can be read again.
    """

    id: str
    tenant: str
    owner: str
    body: bytes
    turns: tuple[bytes, ...] = ()
    background: bool = False
    task: asyncio.Task[None] | None = None
    log: Log | None = None
    size: int = field(default=0, init=False)

    @property
    def runs(self) -> bool:
        return self.task is not None


class Store:
    """The records of one API server. The oldest of the owner with most bytes goes first, and none while it runs."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.size = 0
        self._records: dict[str, Record] = {}
        self._ended: dict[str, OrderedDict[str, Record]] = {}  # by owner, oldest first
        self._sizes = Counter[str]()  # by owner, of those that have ended

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Keep a record. Raise Overloaded if there is no room, because all others still run."""
        if record.runs and self.most <= sum(1 for each in self._records.values() if each.runs):
            raise Overloaded(
                f"{self.most} answers are being written in the background; try again later.", retry_after=RETRY_AFTER
            )
        self._records[record.id] = record
        self.update(record)

    def update(self, record: Record, new_bytes: int | None = None) -> None:
        """Account for a record that has changed: by so many bytes, or in any way. It may be dropped for it, or
        others."""
        if self._records.get(record.id) is not record:
            return
        if new_bytes is not None and record.runs:
            record.size += new_bytes
            self.size += new_bytes
        else:
            self._leave(record)
            self._enter(record)
        while self.size > self.most_bytes or len(self._records) > self.most:
            if not self._drop_oldest():
                self._forget_events()
                return

    def find(self, name: str, tenant: str) -> Record | None:
        record = self._records.get(name)
        return record if record is not None and record.tenant == tenant else None

    def remove(self, record: Record) -> None:
        if self._records.pop(record.id, None) is record:
            self._leave(record)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _enter(self, record: Record) -> None:
        events = record.log.events if record.log is not None else ()
        record.size = len(record.body) + sum(map(len, record.turns)) + sum(map(len, events))
        self.size += record.size
        if not record.runs:
            self._ended.setdefault(record.owner, OrderedDict())[record.id] = record
            self._sizes[record.owner] += record.size

    def _leave(self, record: Record) -> None:
        self.size -= record.size
        ended = self._ended.get(record.owner)
        if ended is not None and ended.pop(record.id, None) is not None:
            self._sizes[record.owner] -= record.size
            if not ended:
                del self._ended[record.owner], self._sizes[record.owner]
        record.size = 0

    def _drop_oldest(self) -> bool:
        """Drop the oldest record of the owner with most bytes. Return False if all of them run."""
        if not self._sizes:
            return False
        owner = max(self._sizes, key=self._sizes.__getitem__)
        self.remove(next(iter(self._ended[owner].values())))
        return True

    def _forget_events(self) -> None:
        """Give up the longest log of those that run. Its readers get an error, and the answer is written on."""
        logs = [(sum(map(len, each.log.events)), each) for each in self._records.values() if each.log is not None]
        if not logs or self.size <= self.most_bytes:
            return
        size, record = max(logs, key=lambda pair: pair[0])
        assert record.log is not None
        record.log.events, record.log.forgotten = [], True
        record.log.changed()
        record.size -= size
        self.size -= size
