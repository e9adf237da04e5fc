"""The router as an application: its own routes, and all others passed on."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.core.settings.routing import RouteConfig
from ridgeline.routing import rule_of
from ridgeline.serving.errors import RequestFailed, TimedOut, Unauthenticated, Unavailable
from ridgeline.serving.http.errors import response_for
from ridgeline.serving.http.middleware import HEALTH, with_name
from ridgeline.serving.keys import allowed, bearer
from ridgeline.serving.observed.metrics import CONTENT_TYPE
from ridgeline.serving.router.budget import ByteBudget
from ridgeline.serving.router.figures import page
from ridgeline.serving.router.forward import Forwarder
from ridgeline.serving.router.headers import to_server
from ridgeline.serving.router.paths import OWN, NotRouted
from ridgeline.serving.router.workers import Worker, Workers, union

LIVE = ("/health/live",)
SHUTTING = "the router is shutting down; send the request to another."


class RouterApp:
    """An ASGI application that answers for all workers together. draining: it takes no more requests."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config
        self.workers = Workers(config, rule_of(config.policy))
        self.budget = ByteBudget(config.max_buffered_bytes)
        self.forwarder = Forwarder(self.workers, self.budget)
        self.draining = False
        self._layers: ASGIApp = with_name(self._answered, log=config.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._layers(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def end_all(self) -> None:
        """End what has not ended."""
        self.forwarder.ending = Unavailable("the router shut down before this request had ended.", retry_after=5)
        for worker in self.workers.each:
            worker.end_all()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.draining:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            await self._route(scope, receive, closing)
        except RequestFailed as failure:
            response = response_for(failure, scope)
            if isinstance(failure, TimedOut) or failure.status == 413 or _has_body(scope):
                response.headers["connection"] = "close"  # the rest of a body may still come
            await response(scope, receive, closing)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in HEALTH and path in OWN:
            return await self._health(path)(scope, receive, send)
        if self.draining and path != "/metrics":
            raise Unavailable(SHUTTING, retry_after=5)
        if path not in OWN:
            return await self.forwarder(scope, receive, send)
        if scope["method"] not in ("GET", "HEAD"):
            raise NotRouted(f"{path} is asked for by GET.")
        await (await self._own(path, scope))(scope, receive, send)

    def _health(self, path: str) -> Response:
        down = self.workers.down()
        if path in LIVE:
            return JSONResponse({"status": "ok"})
        if self.draining and path == "/health/ready":
            return _unavailable("the router is shutting down")
        if not self.workers.ready:
            return _unavailable("; ".join(down))
        return JSONResponse({"status": "ok"} | ({"down": down} if down else {}))

    async def _own(self, path: str, scope: Scope) -> Response:
        if path == "/load":
            return JSONResponse({"server_load": self.workers.num_open})
        if path == "/v1/models":
            return await self._models(scope)
        key = self.config.admin_key
        if key and not allowed(bearer(Headers(scope=scope).get("authorization")), (key,)):
            raise Unauthenticated(
                '/metrics asks for the router\'s admin key; send it as "Authorization: Bearer <key>".'
            )
        return Response(page(self.workers, self.budget), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, scope: Scope) -> Response:
        """Ask all workers with the client's own key, and return all that they have."""
        ready = self.workers.ready
        if not ready:
            raise Unavailable("no server behind the router is ready; try again soon.", retry_after=2)
        found = [told for told in await asyncio.gather(*(self._ask(each, scope) for each in ready)) if told is not None]
        if good := [content for status, content in found if status == 200]:
            return Response(msgspec.json.encode(union(good)), media_type="application/json")
        if not found:
            raise Unavailable("no server behind the router said which models it has; try again soon.", retry_after=2)
        return Response(found[0][1], found[0][0], media_type="application/json")

    async def _ask(self, worker: Worker, scope: Scope) -> tuple[int, bytes] | None:
        peer = (scope.get("client") or ("",))[0]
        headers = to_server(scope["headers"], worker.host, scope["state"]["request_id"], peer, -1)
        headers = [(name, value) for name, value in headers if name not in (b"host", b"accept-encoding")]
        try:
            async with asyncio.timeout(self.config.health_timeout):
                status, content = await worker.get(b"/v1/models", headers)
                if status == 200:
                    union([content])
        except Exception:  # a worker that does not answer, or not with models, adds none
            return None
        return status, content


def _unavailable(reason: str) -> Response:
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, {"Retry-After": "5"})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
