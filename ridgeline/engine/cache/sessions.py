"""Sessions whose next turn is expected: what the last turn left stays in the cache ahead of other idle blocks, and what
only the disk has is read before the turn comes.

A request asks for this by `Request.keep`, in seconds. Its session has a name (`Request.session`), or is found again by
its tokens: the next turn begins with the last full block of this one's prompt.

    a request ends      Its pages, on the device and in the host's memory, get a rank above all others that nobody
                        holds (`pool.PINNED`). They are idle all the same: a request that needs pages gets them, once
                        nothing else is idle. So no request waits for a session.
    a block moves down  It is kept in the host's memory too, within the same bounds.
    the next turn       comes as long after the end of the last one as turns of the session did lately (`gap`). After
                        EARLY of that time, less the time of reading it, what the disk alone has is read.
    the time is over    The pages rank as they would without the session.

*Bounds.* A client's sessions together keep `session_share` of the pages of each memory, and all clients' ALL of them.
Of the MOST_HASHES names of blocks that are remembered a client has a quarter at most. Beyond that the session that
ended first goes: of the client that has too much, or of the one that has most. A session is kept for `session_ttl`
seconds at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from ridgeline.core.clock import Clock
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.settings.host_tier import SessionBounds
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.pool import PINNED, BlockPool
from ridgeline.engine.cache.prefix import Hash, PrefixIndex
from ridgeline.engine.sequence import Sequence

ALL = 0.5  # of each memory's pages, for the sessions of all clients
MOST_SESSIONS = 1024  # of a client
MOST_HASHES = 1 << 18  # of all sessions, some 100 bytes each
HASHES = 2  # their place beside the two memories
EARLY = 0.8  # of the time between two turns
RETRY = 0.1  # seconds after which it is tried again to read ahead


class ReadsAhead(Protocol):
    """The methods of `DiskBelow` that are used here. read_ahead: False if it should be tried again later."""

    def seconds_of(self, blocks: int) -> float: ...
    def read_ahead(self, seq: Sequence) -> bool: ...


class SessionPlace(NamedTuple):
    """The place of a session: its client and its tokens' root, and its name or its last full block."""

    owner: str
    root: Hash
    name: str | Hash


class KeptSession:
    """hashes: of its full blocks. tail: the last one of its prompt. ended: when its last turn did; None: the next one
    is here. gap: seconds from the end of a turn to the next one, as it was lately; None: there was no next one.
    expires: until then it is kept. pages: that it keeps, of each memory. ahead: the sequence that stands for it while
    it is read."""

    def __init__(self, place: SessionPlace, seq: Sequence, hashes: list[Hash], tail: Hash) -> None:
        self.place, self.hashes, self.tail = place, hashes, tail
        self.salt, self.prefix_keys = seq.request.cache_salt, seq.request.prefix_keys
        self.ended: float | None = None
        self.gap: float | None = None
        self.expires = 0.0
        self.pages: list[list[int]] = [[], []]
        self.ahead: Sequence | None = None

    def stand_in(self, block_size: int, groups: int) -> Sequence:
        """Return a sequence with the session's blocks, and no tokens that mean anything."""
        length = len(self.hashes) * block_size + 1
        request = Request(
            id="a session",
            prompt_token_ids=(0,) * length,
            params=SamplingParams(),
            seed=0,
            max_total_tokens=length + 1,
            cache_salt=self.salt,
            prefix_keys=self.prefix_keys,
            block_hashes=tuple(self.hashes),
        )
        self.ahead = Sequence(request, groups)
        return self.ahead


class Sessions:
    """The sessions of one cache.

    pools: the device's, and that of the host's memory if there is one. disk: below it, if there is one.

    due: what `tick` will do, for all sessions that there are.
    """

    def __init__(
        self, bounds: SessionBounds, names: Names, index: PrefixIndex, pools: list[BlockPool], clock: Clock
    ) -> None:
        self._share, self._ttl = bounds.share, bounds.ttl
        self._names, self._index, self._clock = names, index, clock
        self.pools = pools
        self.disk: ReadsAhead | None = None
        self._sessions: dict[SessionPlace, KeptSession] = {}  # the one that ended first, first
        self._of: dict[str, dict[KeptSession, None]] = {}  # client → its own, in that order
        self._tails: dict[tuple[str, Hash], KeptSession] = {}
        self._having: dict[Hash, KeptSession] = {}  # block → the newest session that has it
        self._pages: list[Counter[str]] = [Counter(), Counter(), Counter()]  # of each client, and hashes
        self._keeping: list[Counter[tuple[str, int]]] = [Counter(), Counter()]  # sessions of a client that keep a page
        self.due: list[tuple[float, int, KeptSession, float, bool]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    # ---- turns ------------------------------------------------------------------------------------------------

    def came(self, seq: Sequence) -> KeptSession | None:
        """A request has come. Return the session that it goes on with, if there is one."""
        if not self._sessions or not self._names.shares(seq):
            return None
        request = seq.request
        found = None
        if request.session:
            found = self._sessions.get(SessionPlace(request.owner, self._names.root(seq), request.session))
        else:
            found = self._by_tail(request.owner, self._names.skippable(seq))
        if found is not None and found.ended is not None:
            gap = self._clock() - found.ended
            found.gap = gap if found.gap is None else (found.gap + gap) / 2
            found.ended = None
        return found

    def _by_tail(self, owner: str, hashes: list[Hash]) -> KeptSession | None:
        return next((found for each in reversed(hashes) if (found := self._tails.get((owner, each))) is not None), None)

    def left(self, seq: Sequence) -> None:
        """A request with `keep` has ended, and still holds its blocks."""
        request, keep = seq.request, min(seq.request.keep, self._ttl)
        hashes = seq.hashes[: seq.published]
        full = min(seq.num_prompt // self._names.block_size, len(hashes))
        if keep <= 0 or not full or not self._names.shares(seq):
            return
        root, tail = self._names.root(seq), hashes[full - 1]
        place = SessionPlace(request.owner, root, request.session or tail)
        before = self._sessions.get(place)
        if before is None and not request.session:
            before = self._by_tail(request.owner, hashes[:full])
        if before is not None:
            self._drop(before)
        hashes = hashes[: self._make_room(place.owner, HASHES, len(hashes))]
        if not hashes:
            return
        session = KeptSession(place, seq, hashes, tail)
        session.gap = None if before is None else before.gap
        self._add(session, keep)
        columns = range(max(map(len, seq.blocks)))
        above = [(g, b[n]) for n in columns for g, b in enumerate(seq.blocks) if n < len(b) and b[n]]
        for which, blocks in enumerate((above, self._below(hashes))[: len(self.pools)]):
            pages = {self.pools[which].layout.page_of(*block) for block in blocks}
            fresh = sum(not self._keeping[which][place.owner, page] for page in pages)
            self._make_room(place.owner, which, fresh)
            self._pin(session, which, blocks)

    def _below(self, hashes: list[Hash]) -> list[tuple[int, int]]:
        nodes = filter(None, map(self._index.get, hashes))
        return [(g, block) for node in nodes for g, block in enumerate(node.below) if block is not None]

    def _add(self, session: KeptSession, keep: float) -> None:
        owner = session.place.owner
        now = session.ended = self._clock()
        session.expires = now + keep
        self._sessions[session.place] = session
        own = self._of.setdefault(owner, {})
        own[session] = None
        self._tails[owner, session.tail] = session
        self._having.update(dict.fromkeys(session.hashes, session))
        self._pages[HASHES][owner] += len(session.hashes)
        self._remind(session, session.expires, ahead=False)
        if self.disk is not None and session.gap is not None:
            early = EARLY * session.gap - self.disk.seconds_of(len(session.hashes))
            self._remind(session, now + max(0.0, early), ahead=True)
        while len(own) > MOST_SESSIONS:
            self._drop(next(iter(own)))

    def _remind(self, session: KeptSession, when: float, *, ahead: bool) -> None:
        self._count += 1
        if len(self.due) > 4 * len(self._sessions) + 64:
            self.due = [entry for entry in self.due if self._is_live(entry[2], entry[3])]
            heapify(self.due)
        heappush(self.due, (when, self._count, session, session.expires, ahead))

    def _is_live(self, session: KeptSession, expires: float) -> bool:
        return self._sessions.get(session.place) is session and session.expires == expires

    # ---- pages ------------------------------------------------------------------------------------------------

    def saved(self, node_hash: Hash, group: int, below: int) -> None:
        """A block was published in the host's memory."""
        session = self._having.get(node_hash)
        if session is not None and session.place in self._sessions:
            self._pin(session, 1, [(group, below)])  # drops no other: the device's pool may be evicting

    def _bounds(self, which: int) -> tuple[int, int]:
        """Return the most pages of a memory, or hashes, of one client and of all."""
        if which == HASHES:
            return MOST_HASHES // 4, MOST_HASHES
        pages = self.pools[which].num_pages
        return int(self._share * pages), int(ALL * pages)

    def _room(self, owner: str, which: int) -> int:
        counts, (most, everything) = self._pages[which], self._bounds(which)
        return max(0, min(most - counts[owner], everything - counts.total()))

    def _make_room(self, owner: str, which: int, wanted: int) -> int:
        """End older sessions that take so many more pages, or hashes, beyond the bounds. Return the room there is."""
        counts, (most, everything) = self._pages[which], self._bounds(which)
        while counts[owner] + wanted > most and (other := self._oldest(owner, which)) is not None:
            self._drop(other)
        while counts.total() + wanted > everything and (other := self._of_the_largest(owner, which)) is not None:
            self._drop(other)
        return self._room(owner, which)

    def _pin(self, session: KeptSession, which: int, blocks: Iterable[tuple[int, int]]) -> None:
        """Keep as many of the blocks as the bounds allow. Pages that another session of the client keeps are not
        counted again."""
        owner, pool, keeping = session.place.owner, self.pools[which], self._keeping[which]
        parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
        for block in blocks:
            parts[not keeping[owner, pool.layout.page_of(*block)]].append(block)
        shared = pool.await_return((session, which), parts[0], PINNED)
        fresh = pool.await_return((session, which), parts[1], PINNED, self._room(owner, which))
        keeping.update((owner, page) for page in (*shared, *fresh))
        session.pages[which] += (*shared, *fresh)
        self._pages[which][owner] += len(fresh)

    def _oldest(self, owner: str, which: int) -> KeptSession | None:
        return next((each for each in self._of.get(owner, ()) if which == HASHES or each.pages[which]), None)

    def _of_the_largest(self, client: str, which: int) -> KeptSession | None:
        """Return the oldest session of the client that keeps most, if that is no less than this client."""
        counts = self._pages[which]
        owner = max(counts, key=lambda name: (counts[name], name), default="")
        return self._oldest(owner, which) if counts[owner] >= counts[client] else None

    def _drop(self, session: KeptSession) -> None:
        """Keep a session's pages no longer."""
        owner = session.place.owner
        if self._sessions.get(session.place) is session:
            del self._sessions[session.place]
        own = self._of[owner]
        del own[session]
        if not own:
            del self._of[owner]
        if self._tails.get((owner, session.tail)) is session:
            del self._tails[owner, session.tail]
        for node_hash in session.hashes:
            if self._having.get(node_hash) is session:
                del self._having[node_hash]
        for which, pool in enumerate(self.pools):
            pool.returned((session, which))
            keeping = self._keeping[which]
            keeping.subtract((owner, page) for page in session.pages[which])
            last = [page for page in session.pages[which] if not keeping[owner, page]]
            for page in last:
                del keeping[owner, page]
            self._uncount(which, owner, len(last))
        self._uncount(HASHES, owner, len(session.hashes))

    def _uncount(self, which: int, owner: str, number: int) -> None:
        counts = self._pages[which]
        counts[owner] -= number
        if not counts[owner]:
            del counts[owner]

    # ---- time -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: end sessions whose time is over, and read ahead what the disk alone has."""
        now = self._clock() if self.due else 0.0
        while self.due and self.due[0][0] <= now:
            _, _, session, expires, ahead = heappop(self.due)
            if not self._is_live(session, expires):
                continue
            if not ahead:
                self._drop(session)
            elif session.ended is not None and self.disk is not None:
                seq = session.ahead or session.stand_in(self._names.block_size, len(self.pools[0].layout.groups))
                if not self.disk.read_ahead(seq):
                    self._remind(session, now + RETRY, ahead=True)

    def forget(self) -> None:
        """Keep nothing any more: the cache holds other things from now on."""
        for session in list(self._sessions.values()):
            self._drop(session)
        self.due.clear()
