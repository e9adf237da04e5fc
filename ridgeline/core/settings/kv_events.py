"""Settings of the KV events that an engine publishes: vLLM's `kv_events_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import ip_address

from ridgeline.core.errors import InvalidConfig

TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
LONGEST = 4096  # characters of an endpoint or a topic
ENABLE = "enable_kv_cache_events"


@dataclass(frozen=True, kw_only=True)
class KVEvents:
    """The addresses at which changes of the prefix cache are published, and how many may wait.

    endpoint: ZeroMQ's address of the publisher, tcp://HOST:PORT or ipc://PATH. It is bound where it is one of this
        machine (loopback, *, 0.0.0.0, ::), and connected to otherwise, as with vLLM.
    replay_endpoint: the address where subscribers ask for batches that they missed (None: there is none).
    topic: the first part of every message.
    buffer_steps: the batches that are kept for that. hwm: those that may wait for a slow subscriber.
    max_queue_size: those that may wait for the publisher's thread. Beyond any of these batches are lost, which
        subscribers see by their numbers.
    data_parallel_rank: the number of this engine among several. Ports are higher by it.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 10_000
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "replay_endpoint" and value is None):
                raise InvalidConfig(f"{name} of kv_events_config must be a text, got {value!r}.")
            if len(value or "") > LONGEST:
                raise InvalidConfig(f"{name} of kv_events_config is longer than {LONGEST} characters.")
            if not (value or "").isascii() and (value or "").encode("utf-8", "replace").decode() != value:
                raise InvalidConfig(f"{name} of kv_events_config must be a text of Unicode, got {value!r}.")
        for name, least in (("buffer_steps", 0), ("hwm", 1), ("max_queue_size", 1), ("data_parallel_rank", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10_000_000:
                raise InvalidConfig(f"{name} of kv_events_config must be a number from {least}, got {value!r}.")
        for address in self.addresses:
            check_address(address, self.data_parallel_rank)
        if len(set(self.addresses)) < len(self.addresses):
            raise InvalidConfig(f"endpoint and replay_endpoint of kv_events_config are both {self.endpoint}.")

    @property
    def addresses(self) -> list[str]:
        """The endpoint, and that of replays."""
        return [self.endpoint, *([] if self.replay_endpoint is None else [self.replay_endpoint])]

    def of_rank(self, address: str) -> str:
        """Return an address with the port, or the path, of this engine."""
        if not self.data_parallel_rank:
            return address
        if address.startswith("ipc://"):
            return f"{address}.{self.data_parallel_rank}"
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + self.data_parallel_rank}"


def check_address(address: str, rank: int = 0) -> None:
    """Raise InvalidConfig for what is no endpoint, or has no port for an engine of this rank."""
    path = address.removeprefix("ipc://")
    if path != address and path and not path.startswith("@") and "\0" not in path:
        return
    found = TCP.fullmatch(address)
    if found is None:
        raise InvalidConfig(f"{address!r} is no endpoint of KV events; give tcp://HOST:PORT or ipc://PATH.")
    if not 1 <= int(found[2]) + rank <= 65_535:
        raise InvalidConfig(
            f"{address!r}, an endpoint of KV events, has the port {int(found[2]) + rank}; give 1 to 65535."
        )


def is_bound(address: str) -> bool:
    """Return True for an address of this machine."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ip_address(host).is_unspecified or not is_open(address)
    return host == "*" or not is_open(address)


def is_open(address: str) -> bool:
    """Return True for an address that others than this machine's own processes may reach."""
    if address.startswith("ipc://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host.lower() != "localhost"


def read_kv_events(given: object) -> KVEvents | None:
    """Return the settings of a `kv_events_config`, or None where it asks for none. Raise InvalidConfig."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidConfig(f'kv_events_config must be an object, as {{"{ENABLE}": true}}, got {given!r}.')
    values = dict(given)
    wanted, publisher = values.pop(ENABLE, False), values.pop("publisher", None)
    known = [each.name for each in fields(KVEvents)]
    for name in values:
        if name not in known:
            raise InvalidConfig(f"kv_events_config has no {name!r}; it has {ENABLE}, publisher, {', '.join(known)}.")
    if not isinstance(wanted, bool):
        raise InvalidConfig(f"{ENABLE} of kv_events_config must be true or false, got {wanted!r}.")
    if publisher not in (None, "zmq", "null"):
        raise InvalidConfig(f"publisher of kv_events_config must be zmq or null, got {publisher!r}.")
    settings = KVEvents(**values)
    return settings if wanted and publisher != "null" else None
