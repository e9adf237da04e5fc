"""Settings of the router: frozen, keyword-only. The flags of `ridgeline route` derive from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from urllib.parse import SplitResult, urlsplit

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.kv_events import check_address

MOST_WORKERS = 1024
ANSWER_BYTES = 192 << 10  # of its answer that an open request holds: a piece that was read, and what its client has not
HEADER = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class RouteConfig:
    """The settings of the router.

    worker_urls: the servers that requests go to, as http://host:port. No request adds or removes one.
    policy: the name of the rule that chooses among them (`ridgeline.routing`).
    host, port: the address that clients talk to.
    kv_events: the addresses of the workers' KV events, one for each in the same order, behind a comma that of
        replays (empty: none is asked).
    session_header: the header that names a request's session.
    worker_api_key: the key with which the workers are asked for their models (None: they ask for none).
    admin_key: the key for /metrics ("": none is asked for).
    health_interval: the seconds between two looks at a worker. health_timeout: the seconds that it has to answer.
    hung_timeout: the seconds after which the requests of a worker that answers no look are ended.
    max_body_bytes: the largest request body.
    max_buffered_bytes: the bytes that all open requests together may hold here.
    max_connections_per_client: the connections that one address may have open (0: no bound).
    shutdown_timeout: the seconds that running requests get to finish.
    ssl_keyfile, ssl_certfile, ssl_keyfile_password: files for HTTPS with clients, as the server's.
    worker_ca_certs: the certificates that those of https workers must be signed by (None: the system's).
    log_level, log_json, access_log: as the server's.
    """

    worker_urls: tuple[str, ...] = ()
    policy: str = "prefix"
    kv_events: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    session_header: str = "x-session-id"
    worker_api_key: str = ""
    admin_key: str = ""
    health_interval: float = 2.0
    health_timeout: float = 5.0
    hung_timeout: float = 30.0
    max_body_bytes: int = 32 << 20
    max_buffered_bytes: int = 1 << 30
    max_connections_per_client: int = 1024
    shutdown_timeout: float = 30.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    worker_ca_certs: str | None = None
    log_level: str = "info"
    log_json: bool = False
    access_log: bool = True

    def __post_init__(self) -> None:
        if not self.worker_urls:
            raise InvalidConfig("the router has no workers; name them with --worker-urls http://HOST:PORT …")
        if len(self.worker_urls) > MOST_WORKERS:
            raise InvalidConfig(f"there are {len(self.worker_urls)} workers; a router has at most {MOST_WORKERS}.")
        if twice := [url for url in self.workers if self.workers.count(url) > 1]:
            raise InvalidConfig(f"the worker {twice[0]} is named twice; leave one of them out.")
        if self.kv_events and len(self.kv_events) != len(self.worker_urls):
            raise InvalidConfig(
                f"kv_events has {len(self.kv_events)} addresses for {len(self.worker_urls)} workers; give one for each."
            )
        for address in [each for pair in self.kv_events for each in pair.split(",", 1)]:
            check_address(address)
        if not 0 <= self.port <= 65_535:
            raise InvalidConfig(f"there is no port {self.port}; ports are 0 to 65535.")
        for name in ("health_interval", "health_timeout", "hung_timeout"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidConfig(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}.")
        for name, low in (("max_body_bytes", 1), ("max_connections_per_client", 0)):
            if getattr(self, name) < low:
                raise InvalidConfig(f"{name} must be at least {low}, got {getattr(self, name)!r}.")
        if self.max_buffered_bytes < self.max_body_bytes + ANSWER_BYTES:
            least = f"max_body_bytes + {ANSWER_BYTES} bytes for its answer"
            raise InvalidConfig(f"max_buffered_bytes must be at least {least}, got {self.max_buffered_bytes!r}.")
        if not (isfinite(self.shutdown_timeout) and self.shutdown_timeout >= 0):
            raise InvalidConfig(f"shutdown_timeout must be a number of seconds, got {self.shutdown_timeout!r}.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise InvalidConfig("ssl_keyfile and ssl_certfile belong together; give both or none.")
        if self.worker_ca_certs and not any(url.startswith("https:") for url in self.workers):
            raise InvalidConfig("worker_ca_certs is for workers at https://HOST:PORT, and there is none; leave it out.")
        if not HEADER.fullmatch(self.session_header):
            raise InvalidConfig(f"session_header is small letters, digits and dashes, got {self.session_header!r}.")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidConfig(f"unknown log_level {self.log_level!r}; use debug, info, warning or error.")

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers' addresses in their plain form. Raise InvalidConfig for one that is none."""
        return tuple(map(address_of, self.worker_urls))


def address_of(url: str) -> str:
    """Return a worker's address in its plain form, http://host:port. Raise InvalidConfig for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
    except ValueError:
        parts, port, plain = SplitResult("", "", "", "", ""), 0, False
    if parts.username is not None or parts.password is not None:
        raise InvalidConfig("a worker's URL holds a user or a password; clients' own keys are passed on, leave it out.")
    if not plain or parts.query or parts.fragment or not url.isascii() or any(c.isspace() for c in url):
        raise InvalidConfig(f"{url!r} is no worker; give http://HOST:PORT.")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
