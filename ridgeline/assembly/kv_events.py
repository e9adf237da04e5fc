"""From the engine's changes of its prefix cache to vLLM's KV events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.state import StateSpec
from ridgeline.engine.cache.events import Change, Removed, Stored
from ridgeline.engine.cache.prefix import Hash
from ridgeline.engine.engine import Engine

if TYPE_CHECKING:
    from ridgeline.transport.kv_events import BlockHash, Event, KVEventPublisher

AT_ONCE = 4096  # tokens of an event, unless one block has more, and blocks of one that tells which are gone
KINDS = {  # in vLLM's words
    **{"latent": "mla_attention", "recurrent": "mamba", "cross_kv": "cross_attention"},
    "chunked_kv": "chunked_local_attention",
}


def check_events(config: LLMConfig) -> None:
    """Raise InvalidConfig where events are asked for and a package is missing."""
    for package in ("zmq", "msgspec") if config.kv_events is not None else ():
        if find_spec(package) is None:
            raise InvalidConfig(f"kv_events_config needs the package {package}; pip install 'ridgeline[serve]'.")


def tell_events(config: LLMConfig, engines: Sequence[Engine]) -> None:
    """Publish the events of these engines, each at a port of its own, if the settings ask for it. Raise InvalidConfig
    where an address cannot be had."""
    if (settings := config.kv_events) is None:
        return
    from ridgeline.transport.kv_events import KVEventPublisher  # here, because it needs packages of the server

    for number, engine in enumerate(engines):
        rank = settings.data_parallel_rank + number
        engine.tell_blocks(KVEventSink(engine.layout, KVEventPublisher(replace(settings, data_parallel_rank=rank))))


class KVEventSink:
    """Turns changes into events, and publishes them."""

    def __init__(self, layout: CacheLayout, publisher: KVEventPublisher) -> None:
        self._publisher = publisher
        self._kinds = [_kind(group.spec) for group in layout.groups]

    def take(self, changes: list[Change]) -> None:
        self._publisher.publish(list(self._events(changes)))

    def close(self) -> None:
        self._publisher.close()

    def _events(self, changes: list[Change]) -> Iterator[Event]:
        from ridgeline.transport.kv_events import MEDIUM, AllBlocksCleared, BlockRemoved

        for change in changes:
            if isinstance(change, Stored):
                yield from self._stored(change)
            elif isinstance(change, Removed):
                for start in range(0, len(change.hashes), AT_ONCE):
                    hashes: list[BlockHash] = [short(each) for each in change.hashes[start : start + AT_ONCE]]
                    yield BlockRemoved(hashes, MEDIUM, change.group)
            else:
                yield AllBlocksCleared()

    def _stored(self, change: Stored) -> Iterator[Event]:
        from ridgeline.transport.kv_events import MEDIUM, BlockStored

        kind, window = self._kinds[change.group]
        hashes: list[BlockHash] = [short(each) for each in change.hashes]
        size, parent = change.size, change.parent
        before: BlockHash | None
        each, before = max(1, AT_ONCE // size), None if parent is None else short(parent)
        for start in range(0, len(hashes), each):
            end = min(len(hashes), start + each)
            yield BlockStored(
                block_hashes=hashes[start:end],
                parent_block_hash=before,
                token_ids=change.tokens[start * size : end * size],
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=[keys or None for keys in change.extra[start:end]],
                group_idx=change.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            before = hashes[end - 1]


def short(node_hash: Hash) -> int:
    """Return a hash as events have it, in 64 bits."""
    return int.from_bytes(node_hash[:8], "big")


def _kind(spec: StateSpec) -> tuple[str, int | None]:
    window: int | None = getattr(spec, "window", None)
    if spec.kind == "kv":
        return ("full_attention", None) if window is None else ("sliding_window", window)
    return KINDS.get(spec.kind, "unknown"), window
