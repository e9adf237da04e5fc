"""Changes of the prefix cache for other processes, in the form of vLLM's KV events over ZeroMQ.

A message has three parts: the topic, the batch's number (8 bytes, the most significant one first), and the batch in
msgpack: [time in seconds, events, rank]. An event is a map, whose `type` names it. A subscriber that misses a number
asks the replay socket for the batches from that one on, with a message of its 8 bytes. Each comes as [number, batch],
and -1 with an empty batch says that there are no more.

The engine never waits: a batch for which there is no room is lost, and its number with it. Batches wait in
bounded numbers and bytes: for the thread that sends them, for each subscriber, and for replays.
"""

from __future__ import annotations

import errno
import logging
import socket as sockets
import stat
import threading
import time
from collections import deque
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.kv_events import KVEvents, is_bound, is_open

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192  # of a batch, and of an event that is not one block alone, so that what waits is bounded
QUEUE_TOKENS = 16 << 20  # that wait for the thread
REPLAY_BYTES = 64 << 20  # of batches that are kept
REPLAYS = 64  # clients whose replays are under way at once
AHEAD = 256  # batches that wait for a replay's client
LAST = (-1).to_bytes(8, "big", signed=True)
RETRY = 50  # milliseconds until a replay's client is looked at again that had no room
BELLS = count()
MEDIUM = "GPU"  # where vLLM says that the engine's own cache is, whatever the device


BlockHash = int | bytes  # vLLM has both forms


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that can be found. The fields and their meaning are vLLM's; hashes are the first 64 bits of ours."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


class KVEventPublisher:
    """Publishes batches. `publish` belongs to one thread, and all sockets but its own to another."""

    def __init__(self, settings: KVEvents) -> None:
        """Raise InvalidConfig where an address cannot be had."""
        self._settings, self._number = settings, 0
        self._queue = deque[tuple[int, EventBatch, int]]()  # with the batch's number, and the tokens that it counts as
        self._queued = 0  # tokens of them
        self._lock = threading.Lock()
        self._kept, self._kept_bytes = deque[tuple[int, bytes]](), 0
        self._replays: dict[bytes, int] = {}  # client → the number that it gets next
        self._stopped = False
        self.lost = 0  # batches for which there was no room
        kinds = (zmq.PUB, zmq.ROUTER, zmq.PAIR, zmq.PAIR)
        made: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(kind) for kind in kinds]
        self._out, self._asked, self._bell, self._heard = made
        for each, ahead in ((self._out, settings.hwm), (self._asked, AHEAD), (self._bell, 0), (self._heard, 0)):
            each.set_hwm(ahead)
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.MAXMSGSIZE, 1024)  # nobody sends us more
        self._asked.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._open()
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="ridgeline-kv-events", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        bell = f"inproc://kv-events-{next(BELLS)}"  # one that was just closed may have its name for a moment longer
        self._heard.bind(bell)
        self._bell.connect(bell)
        for socket, address in zip((self._out, self._asked), self._settings.addresses, strict=False):
            own = self._settings.of_rank(address)
            try:
                if "[" in own:
                    socket.setsockopt(zmq.IPV6, 1)
                if is_bound(address) or socket is self._asked:
                    _check_path(own)
                    socket.bind(own)
                else:
                    socket.connect(own)
            except zmq.ZMQError as error:
                raise InvalidConfig(f"the endpoint {own} of kv_events_config cannot be had: {error}.") from error
            if is_open(address):
                logger.warning(
                    "KV events, which hold the tokens of all conversations, leave this machine's own processes: %s", own
                )
        logger.info("KV events are published on %s", self._settings.of_rank(self._settings.endpoint))

    def publish(self, events: list[Event]) -> None:
        """Send events as the next batches."""
        batch, tokens = list[Event](), 0
        for event in events:
            size = 1
            if not isinstance(event, AllBlocksCleared):
                size = len(event.token_ids if isinstance(event, BlockStored) else event.block_hashes)
            if batch and tokens + size > MOST_TOKENS:
                self._put(batch, tokens)
                batch, tokens = [], 0
            batch.append(event)
            tokens += size
        self._put(batch, tokens)

    def _put(self, events: list[Event], tokens: int) -> None:
        number, self._number = self._number, self._number + 1
        with self._lock:
            if len(self._queue) >= self._settings.max_queue_size or self._queued + tokens > QUEUE_TOKENS:
                self.lost += 1
                return
            rings = not self._queue  # otherwise the thread has been called, and looks again before it waits
            self._queue.append((number, EventBatch(time.time(), events, self._settings.data_parallel_rank), tokens))
            self._queued += tokens
        if rings:
            self._ring()

    def _ring(self) -> None:
        """Call the thread. The bell has no bound: a socket that was full may say so for a moment longer than it is."""
        with suppress(zmq.Again):  # the thread has ended
            self._bell.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what waits, and end."""
        if not self._stopped:
            self._stopped = True
            self._ring()
            self._thread.join(5)
            self._bell.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        encoder, poller = msgspec.msgpack.Encoder(), zmq.Poller()
        for socket in (self._heard, self._asked):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._stopped or self._queue:
                ready = dict(poller.poll(RETRY if self._replays else None))
                if self._heard in ready:
                    self._heard.recv()
                while self._queue:
                    self._send(encoder)
                if self._asked in ready:
                    self._take_replay()
                for client in list(self._replays):
                    self._replay(client)
        except Exception:
            logger.exception("KV events are published no more")
        finally:
            for each in (self._out, self._asked, self._heard):
                each.close()

    def _send(self, encoder: msgspec.msgpack.Encoder) -> None:
        with self._lock:
            number, batch, tokens = self._queue.popleft()
            self._queued -= tokens
        data = encoder.encode(batch)
        self._out.send_multipart((self._settings.topic.encode(), number.to_bytes(8, "big"), data))
        if self._settings.replay_endpoint is None:
            return
        self._kept.append((number, data))
        self._kept_bytes += len(data)
        while self._kept_bytes > REPLAY_BYTES or len(self._kept) > self._settings.buffer_steps:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _take_replay(self) -> None:
        frames = self._asked.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8 or len(self._replays) >= REPLAYS:
            return  # no question of ours, or one too many: the client asks again
        self._replays[frames[0]] = int.from_bytes(frames[2], "big")

    def _replay(self, client: bytes) -> None:
        """Send a client as many of its batches as it has room for. The rest waits until it has read some."""
        wanted = self._replays[client]
        try:
            for number, data in list(self._kept):
                if number >= wanted:
                    self._asked.send_multipart((client, b"", number.to_bytes(8, "big"), data), zmq.NOBLOCK)
                    self._replays[client] = wanted = number + 1
            self._asked.send_multipart((client, b"", LAST, b""), zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError:  # it has left
            pass
        del self._replays[client]

    def _close_sockets(self) -> None:
        for each in (self._out, self._asked, self._bell, self._heard):
            each.close()


def _check_path(address: str) -> None:
    """Raise InvalidConfig for the path of a file, or of a socket that another process listens to: ZeroMQ would put a
    socket of its own in the place of either."""
    path = address.removeprefix("ipc://")
    try:
        mode = Path(path).lstat().st_mode if path != address else 0
    except OSError:
        return
    if mode and not stat.S_ISSOCK(mode):
        raise InvalidConfig(f"the endpoint {address} of kv_events_config is there, and is no socket; name another.")
    with closing(sockets.socket(sockets.AF_UNIX)) as probe:
        probe.settimeout(1)
        if mode and probe.connect_ex(path) != errno.ECONNREFUSED:  # refused: its process has ended
            raise InvalidConfig(f"the endpoint {address} of kv_events_config is another process's; name another.")
