"""A subscriber to KV events with vLLM's documented structs (version 0.26), which knows nothing of ours."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

PATIENCE = 30.0  # seconds for what takes a moment where nothing else runs


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """batches: by number. found: (group, hash) of blocks that can be found, by the batches in order."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self.batches: dict[int, KVEventBatch] = {}

    def read(self, wait: float = 0.0) -> bool:
        """Take one message, if one comes in time."""
        if not self._socket.poll(int(1000 * wait)):
            return False
        _, number, data = self._socket.recv_multipart()
        self.batches[int.from_bytes(number, "big")] = msgspec.msgpack.decode(data, type=KVEventBatch)
        return True

    def read_until(self, number: int) -> None:
        end = time.monotonic() + PATIENCE
        while max(self.batches, default=-1) < number:
            assert time.monotonic() < end
            self.read(0.1)

    @property
    def found(self) -> set[tuple[int | None, bytes | int]]:
        found = set[tuple[int | None, bytes | int]]()
        for _, batch in sorted(self.batches.items()):
            for event in batch.events:
                match event:
                    case BlockStored():
                        found |= {(event.group_idx, each) for each in event.block_hashes}
                    case BlockRemoved():
                        found -= {(event.group_idx, each) for each in event.block_hashes}
                    case _:
                        found.clear()
        return found

    def close(self) -> None:
        self._socket.close(0)


def replayed(endpoint: str, first: int) -> dict[int, KVEventBatch]:
    """Return the batches from a number on, as vLLM's example asks for them."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    found: dict[int, KVEventBatch] = {}
    try:
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert socket.poll(int(1000 * PATIENCE))
            _, number, data = socket.recv_multipart()
            if not data:
                assert number == (-1).to_bytes(8, "big", signed=True)
                return found
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(data, type=KVEventBatch)
    finally:
        socket.close(0)
