"""The servers behind a router, and what is known of each."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import httpcore
import msgspec

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.routing import RouteConfig
from ridgeline.routing import KnowsRoom, RoutingRule, ServerLoad
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.router.asked import Asked
from ridgeline.serving.router.cached import CachedTokens, follow
from ridgeline.serving.router.headers import Headers

logger = logging.getLogger("ridgeline.router")

CONNECT = 5.0  # seconds for a connection
IDLE = 4.0  # seconds that an idle connection is kept: uvicorn keeps it for 5, and must not close it as it is used
MOST_IDLE = 32  # connections of a worker
READY, HEALTH, MODELS = b"/health/ready", b"/health", b"/v1/models"
LONGEST = 1 << 20  # bytes of a list of models
AGAIN = 15  # looks between two lists of models


class TooLong(Exception):
    """Raised for an answer beyond its bound."""


class Worker:
    """A server that requests go to.

    open: what ends each of its open requests: a timeout that is set to now.
    tokens: of its open requests. why: the reason that it takes no requests, "" if it does.
    models: those that it has, None where they are unknown.
    """

    def __init__(self, number: int, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.number, self.url = number, url
        parts = httpcore.URL(url)
        self.scheme, self.hostname, self.port = parts.scheme, parts.host, parts.port
        self.host = url.partition("://")[2].encode()
        self.pool = httpcore.AsyncConnectionPool(
            ssl_context=tls, max_connections=None, max_keepalive_connections=MOST_IDLE, keepalive_expiry=IDLE
        )
        self.open: set[asyncio.Timeout] = set()
        self.tokens = 0
        self.why = "it has not been asked yet"
        self.models: frozenset[str] | None = None
        self.chosen = 0
        self.errors: Counter[str] = Counter()
        self.silent_since: float | None = None  # when it stopped to answer looks
        self.restarted = False  # it refused connections, so its process is another one now
        self.room: int | None = None  # tokens that its cache holds, if its KV events have told
        self.forgotten = 0  # how often they said that it holds none any more
        self.look = asyncio.Event()  # set to look at once

    @property
    def ready(self) -> bool:
        return not self.why

    @property
    def load(self) -> ServerLoad:
        return ServerLoad(len(self.open), self.tokens)

    def request(self, method: bytes, target: bytes, headers: Headers, content: Any = None) -> httpcore.Request:
        """Return a request to the worker."""
        url = httpcore.URL(scheme=self.scheme, host=self.hostname, port=self.port, target=target)
        extensions = {"timeout": {"connect": CONNECT}}
        return httpcore.Request(method, url, headers=headers, content=content, extensions=extensions)

    async def get(self, target: bytes, headers: Headers) -> tuple[int, bytes]:
        """Return the status and the content of an answer of bounded length. Raise TooLong, or httpcore's errors."""
        asked = self.request(b"GET", target, [(b"host", self.host), *headers])
        response = await self.pool.handle_async_request(asked)
        content = bytearray()
        try:
            async for piece in _stream(response):
                content += piece
                if len(content) > LONGEST:
                    raise TooLong
        finally:
            await response.aclose()
        return response.status, bytes(content)

    def lost(self, why: str) -> None:
        """Take no more requests: a connection was refused. What the worker had cached is gone with its process."""
        if self.ready:
            logger.warning("%s is not ready: %s", self.url, why)
        self.why, self.restarted = why, True
        self.look.set()

    def end_all(self) -> None:
        """End all its open requests."""
        now = asyncio.get_running_loop().time()
        for each in self.open:
            each.reschedule(now)


class Workers:
    """All servers, and the rule that chooses among them. retries: requests that went on to another, because the first
    took no connection."""

    def __init__(self, config: RouteConfig, rule: RoutingRule) -> None:
        self.config, self._rule = config, rule
        tls = tls_of(config)
        self.each = [Worker(number, url, tls) for number, url in enumerate(config.workers)]
        self.retries = 0

    @property
    def ready(self) -> list[Worker]:
        return [each for each in self.each if each.ready]

    @property
    def num_open(self) -> int:
        return sum(len(each.open) for each in self.each)

    def down(self) -> list[str]:
        """Return the fault of each worker that takes no requests."""
        return [f"{each.url}: {each.why}" for each in self.each if not each.ready]

    def choose(self, asked: Asked, home: int | None, tried: Collection[Worker]) -> Worker:
        """Return the worker for a request. home: the number of the one that has what the request goes on from. Raise
        Unavailable if there is none."""
        ready = [each for each in self.ready if each not in tried]
        if not ready:
            raise Unavailable("no server behind the router is ready; try again soon.", retry_after=2)
        having = [each for each in ready if not asked.model or each.models is None or asked.model in each.models]
        if not having and any(asked.model in (each.models or ()) for each in self.each):
            raise Unavailable(f"no server that has {asked.model!r} is ready; try again soon.", retry_after=2)
        fit = {each.number: each for each in having or ready}
        if home in fit:
            return fit[home]
        loads = {number: each.load for number, each in fit.items()}
        salt = f"{asked.model}\0{asked.salt}"
        return fit[self._rule.choose(asked.prompt, salt, loads, session=asked.session)]

    async def watch(self) -> None:
        """Look at all workers, again and again, until cancelled."""
        following = [
            self._follow(each, address) for each, address in zip(self.each, self.config.kv_events, strict=False)
        ]
        await asyncio.gather(*(self._watch(each) for each in self.each), *following)

    async def _follow(self, worker: Worker, address: str) -> None:
        """Tell the rule what a worker says of its cache."""
        told, rule = CachedTokens(), self._rule

        def note() -> None:
            if told.forgets != worker.forgotten:
                rule.forget(worker.number)
                worker.forgotten = told.forgets
            if isinstance(rule, KnowsRoom) and told.size != worker.room:
                worker.room = told.size
                rule.bound(worker.number, told.size)

        try:
            await follow(address, told, note)
        except Exception:  # affinity alone is less sure then
            logger.exception("%s: its KV events are followed no more", worker.url)

    async def close(self) -> None:
        for each in self.each:
            with suppress(Exception):
                await each.pool.aclose()

    async def _watch(self, worker: Worker) -> None:
        looks = 0
        while True:
            worker.look.clear()
            was = worker.ready
            why = await self._fault(worker)
            if not why and (not was or looks % AGAIN == 0):
                worker.models = await self._models(worker)
            worker.why = why
            if worker.ready and worker.restarted:
                self._rule.forget(worker.number)
                worker.restarted = False
            if worker.ready is not was:
                logger.log(
                    logging.INFO if worker.ready else logging.WARNING,
                    "%s is %s", worker.url, "ready" if worker.ready else f"not ready: {worker.why}",
                )  # fmt: skip
            self._end_hung(worker)
            looks += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.look.wait(), self.config.health_interval)

    async def _fault(self, worker: Worker) -> str:
        """Return the reason that a worker should get no requests, or ""."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.health_timeout):
                status, _ = await worker.get(READY, [])
                if status == 404:  # not ours
                    status, _ = await worker.get(HEALTH, [])
        except TimeoutError:
            worker.silent_since = worker.silent_since or loop.time()
            return f"it did not answer within {self.config.health_timeout:g} s"
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            worker.silent_since, worker.restarted = None, True
            return f"it takes no connection ({error})"
        except Exception as error:  # whatever a server that is no server sends
            worker.silent_since = None
            return f"its answer was none ({type(error).__name__})"
        worker.silent_since = None
        return "" if status == 200 else f"its /health says {status}"

    async def _models(self, worker: Worker) -> frozenset[str] | None:
        """Return the models that a worker has, or None if it does not say."""
        key = self.config.worker_api_key
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        try:
            async with asyncio.timeout(self.config.health_timeout):
                status, content = await worker.get(MODELS, headers)
            return frozenset(str(each["id"]) for each in models_of(content)) if status == 200 else None
        except Exception:  # as above
            return None

    def _end_hung(self, worker: Worker) -> None:
        if worker.silent_since is None or not worker.open:
            return
        silent = asyncio.get_running_loop().time() - worker.silent_since
        if silent >= self.config.hung_timeout:
            logger.warning("%s has not answered for %.0f s: its %d requests end", worker.url, silent, len(worker.open))
            worker.end_all()


def tls_of(config: RouteConfig) -> ssl.SSLContext | None:
    """Return the checks of https workers' certificates, or None if there are no such workers. Raise InvalidConfig for a
    file that is none."""
    if not any(url.startswith("https:") for url in config.workers):
        return None
    try:
        return ssl.create_default_context(cafile=config.worker_ca_certs)
    except OSError as error:
        raise InvalidConfig(f"worker_ca_certs {config.worker_ca_certs} cannot be used ({error}).") from error


def models_of(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list of models. Raise MsgspecError, KeyError or TypeError for another document."""
    return [each for each in msgspec.json.decode(content, type=dict[str, Any])["data"] if "id" in each]


def _stream(response: httpcore.Response) -> Any:
    return response.aiter_stream()


def union(lists: Iterable[bytes]) -> dict[str, Any]:
    """Return one list of the models of several, each by its first entry, in the first list's form."""
    whole: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for content in lists:
        whole = whole or msgspec.json.decode(content, type=dict[str, Any])
        for entry in models_of(content):
            found.setdefault(str(entry["id"]), entry)
    whole["data"] = list(found.values())
    if "last_id" in whole and found:  # Anthropic's form
        whole["first_id"], whole["last_id"] = next(iter(found)), list(found)[-1]
    return whole
