"""The size of each server's prefix cache, from its KV events (docs/kv-events.md).

A router knows texts and events know tokens, so events do not say which texts are cached. They say how many tokens a
server's cache holds as it begins to evict, and when it was cleared: a router that counts on no more than that is right
about what a server has, as far as both forget what was used longest ago.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from ridgeline.transport.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch

logger = logging.getLogger("ridgeline.router")

LARGEST = 8 << 20  # bytes of a message
MOST_BLOCKS = 1 << 20  # of a server that are counted, about 100 MB
REPLAY = 5.0  # seconds for the next batch of a replay
WAITING = 10_000  # messages that wait to be read


class CachedTokens:
    """The blocks that a server has told of.

    size: the most tokens that its cache held, once it has evicted some (None: not known yet).
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self.forgets = 0  # how often all was cleared
        self.expected: int | None = None  # the number of the next batch
        self._time = 0.0  # of the last one, by the server's clock
        self._sure = False  # all blocks are known
        self._blocks: dict[tuple[int | None, BlockHash], int] = {}  # and their tokens
        self._tokens: dict[int | None, int] = {}  # of each group
        self._full, self._peak = 0, 0  # tokens of a full block; the most tokens so far
        self._evicted = False

    def take(self, number: int, batch: EventBatch) -> None:
        """Take note of a batch. Without the ones before it the rest is a guess, until all is cleared."""
        if self.expected is not None and number < self.expected:
            if batch.ts <= self._time:
                return  # it came twice, live and as a replay
            self.forgets += 1  # another engine
        if number != self.expected:
            self._unsure()
        self.expected, self._time = number + 1, batch.ts
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._unsure()
                    self._sure, self.forgets = True, self.forgets + 1
        if self._sure:
            self._peak = max(self._peak, *self._tokens.values(), 0)
            self.size = self._peak if self._evicted else None

    def _unsure(self) -> None:
        self._sure, self._evicted, self._peak, self.size = False, False, 0, None
        self._blocks.clear()
        self._tokens.clear()

    def _store(self, event: BlockStored) -> None:
        if not self._sure:
            return
        self._full = max(self._full, event.block_size)
        for each in event.block_hashes:
            if (event.group_idx, each) not in self._blocks:
                self._blocks[event.group_idx, each] = event.block_size
                self._tokens[event.group_idx] = self._tokens.get(event.group_idx, 0) + event.block_size
        if len(self._blocks) > MOST_BLOCKS:
            self._unsure()

    def _remove(self, event: BlockRemoved) -> None:
        """A block that is not full makes place for a longer one, and tells nothing of the cache's size."""
        for each in event.block_hashes:
            size = self._blocks.pop((event.group_idx, each), 0)
            if size:
                self._tokens[event.group_idx] -= size
                if size == self._full and not self._evicted:
                    self._evicted = True
                    self._peak = max(self._peak, self._tokens[event.group_idx] + size)


async def follow(addresses: str, told: CachedTokens, note: Callable[[], None]) -> None:
    """Follow the events of a server until cancelled, and call `note` after each batch. addresses: its endpoint, and
    behind a comma that of replays, if there is one."""
    endpoint, _, replay = addresses.partition(",")
    socket = _connected(zmq.SUB, endpoint)
    decoder = msgspec.msgpack.Decoder(EventBatch)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        if replay:
            await _replay(replay, told, decoder)
            note()
        while True:
            frames = await socket.recv_multipart()
            try:
                number, batch = int.from_bytes(frames[1], "big"), decoder.decode(frames[2])
            except (IndexError, msgspec.MsgspecError):
                logger.warning("%s sent a message that is no KV event, which is dropped", endpoint)
                continue
            if replay and told.expected is not None and number > told.expected:
                await _replay(replay, told, decoder)
            told.take(number, batch)
            note()
    finally:
        socket.close(0)


async def _replay(address: str, told: CachedTokens, decoder: msgspec.msgpack.Decoder[EventBatch]) -> None:
    """Ask for the batches that were missed, of which some may be lost."""
    socket = _connected(zmq.DEALER, address)
    try:
        await socket.send_multipart((b"", (told.expected or 0).to_bytes(8, "big")))
        while True:
            _, number, data = await asyncio.wait_for(socket.recv_multipart(), REPLAY)
            if not data:
                return
            told.take(int.from_bytes(number, "big"), decoder.decode(data))
    except (TimeoutError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("%s replays no KV events (%s)", address, type(error).__name__)
    finally:
        socket.close(0)


def _connected(kind: int, address: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    for option, value in ((zmq.RCVHWM, WAITING), (zmq.MAXMSGSIZE, LARGEST), (zmq.IPV6, 1), (zmq.LINGER, 0)):
        socket.setsockopt(option, value)
    socket.connect(address)
    return socket
