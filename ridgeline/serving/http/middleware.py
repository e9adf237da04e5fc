"""The layers that every HTTP request passes before a route sees it: plain ASGI, so that streams stay streams.

From the outside in: a name and a line in the log, CORS, keys, no new work while draining, the load where it is asked
for, the whole body within its bound, one answer for requests that come twice, and what the operator adds
(--middleware).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.core.errors import InvalidConfig
from ridgeline.serving import owner, trace_parent
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, RequestFailed, TimedOut, Unauthenticated, Unavailable
from ridgeline.serving.generation.admission import Admission
from ridgeline.serving.http.errors import response_for
from ridgeline.serving.http.exchange import replayed
from ridgeline.serving.http.idempotency import with_idempotency
from ridgeline.serving.http.orca import ANSWERS as LOAD
from ridgeline.serving.http.orca import STRANGER, with_load
from ridgeline.serving.http.paths import is_anthropics, is_under, route_path
from ridgeline.serving.keys import allowed, bearer

access = logging.getLogger("ridgeline.access")

# open without a key
HEALTH = ("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready")
# these change what all clients get
ORDERS = (
    *("/pause", "/resume", "/sleep", "/wake_up", "/reload_weights", "/reset_prefix_cache"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
)
# these show what other clients do, too
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1", "")
ADMIN = (
    *(*ORDERS, "/v1/requests", "/kv", "/dashboard", "/server_info", "/is_paused", "/is_sleeping"),
    *("/get_world_size", "/weight_info"),
)
# these do, and without an admin key only to clients on this machine
LOCAL = ("/kv",)
# of a request that a proxy on this machine passed on, from wherever
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
CLOSED = (
    "this route changes what all clients get, so it is closed; start the server with --admin-key KEY and send that, "
    "or with --open-admin-routes."
)
CLOSED_ABROAD = (
    "this route shows what all clients do, so it answers only those on this machine; start the server with "
    "--admin-key KEY and send that, or with --open-admin-routes."
)
# requests that wait for a paused engine must be able to end
WHILE_DRAINING = (*HEALTH, "/metrics", "/resume", "/is_paused", "/wake_up", "/is_sleeping")
UPLOADS = ("/v1/files",)  # routes that read their body themselves, as it comes
SOUNDS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FORM_BYTES = 64 << 10  # of an upload besides the file
BODY_TIMEOUT = 60.0  # seconds for a body, and between two of its pieces
BODY_PACE = 8 << 10  # bytes that earn the body a second more


class Forbidden(RequestFailed):
    status, kind, code = 403, "invalid_request_error", "admin_key_required"


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"


def wrap(app: ASGIApp, api: ApiServer) -> ASGIApp:
    """Wrap `app` in all layers. Routes find their id in `request.state.request_id`."""
    config = api.config
    layers = with_idempotency(with_operators_own(app, config.middleware))
    uploads = config.batch_file_bytes + FORM_BYTES if config.batch_dir is not None else 0
    layers = with_whole_body(layers, config.max_body_bytes, uploads, config.audio_file_bytes + FORM_BYTES)
    layers = with_draining(with_load(layers, api), api.service.admission)
    orders, trusted = config.open_admin_routes, config.trusted_key
    layers = with_keys(layers, config.api_key, config.admin_key, open_orders=orders, trusted=trusted)
    if config.allowed_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=config.allowed_origins,
            expose_headers=["x-request-id", "x-weight-version", "retry-after", "ridgeline-ignored", LOAD],
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    if config.weight_transfer:
        layers = with_version(layers, api)
    layers = with_name(layers, log=config.access_log)

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await layers(under(config.root_path, scope), receive, send)
        elif scope["type"] == "lifespan":
            await app(scope, receive, send)
        else:  # websockets: no route has them, and no key would guard them
            await send({"type": "websocket.close", "code": 1008})

    return run


def under(prefix: str, scope: Scope) -> Scope:
    """Return the scope of a request under a proxy's prefix (`root_path`), whether or not the proxy removed that from
    the path."""
    path = str(scope["path"])
    if not prefix:
        return scope
    return {**scope, "root_path": prefix, "path": path if is_under(prefix, path) else prefix + path}


def with_operators_own(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """Wrap `app` in the middleware with these import paths, the first outermost: a class is called with the app, and an
    async function for each request with it and call_next. Raise InvalidConfig for one that cannot be had."""
    for name in reversed(names):
        found = _imported(name)
        app = found(app) if isinstance(found, type) else BaseHTTPMiddleware(app, found)
    return app


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # whatever the operator's module raises
        said = f"{type(error).__name__}: {error}"
        raise InvalidConfig(
            f"the middleware {path!r} cannot be imported ({said}); give module.name, with the module's folder in "
            "PYTHONPATH."
        ) from error
    if not isinstance(found, type) and not inspect.iscoroutinefunction(found):
        raise InvalidConfig(f"the middleware {path!r} must be a class or an async function, got {found!r}.")
    return found


def with_name(app: ASGIApp, *, log: bool) -> ASGIApp:
    """Give each request an id, which is the client's own if it is harmless, and a line in the log.

    No query, body or key is logged. Paths are logged as they came, percent-encoded, so nothing in them can break a
    line.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        trace_parent.take(headers.items())
        name = trace_parent.name_of(headers.get("x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = name
        status, began = 499, time.monotonic()  # the client has left, unless there is an answer

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = state["request_id"]
                if is_anthropics(route_path(scope)):
                    answered["request-id"] = state["request_id"]
                if state.get("ignored"):
                    answered["ridgeline-ignored"] = state["ignored"]
            await send(message)

        try:
            await app(scope, receive, named)
        except Exception:
            status = 500
            raise
        finally:
            if log:
                _log(scope, state["request_id"], status, time.monotonic() - began)

    return run


def with_version(app: ASGIApp, api: ApiServer) -> ASGIApp:
    """Name the version of the weights in each answer's header, as it is when the answer begins."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and api.client.known is not None:
                MutableHeaders(scope=message)["x-weight-version"] = api.client.known.weight_version
            await send(message)

        await app(scope, receive, named)

    return run


def with_keys(
    app: ASGIApp,
    keys: Sequence[str],
    admin_keys: Sequence[str],
    *,
    open_orders: bool = False,
    trusted: Sequence[str] = (),
) -> ASGIApp:
    """Ask for a key on every route but health, if there are any keys. An admin key opens every route; if there is one,
    it alone opens those in ADMIN. Without one, those in ORDERS are closed, and those in LOCAL to other machines, unless
    `open_orders` says otherwise. A key in `trusted` may name the tenant; the header of any other is not read."""
    clients = (*keys, *admin_keys) if keys else ()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if path in HEALTH:
            known = not clients or True in [allowed(key, clients) for key in _keys_in(scope)]
            scope.setdefault("state", {})[STRANGER] = not known
            return await app(scope, receive, send)
        needed = (tuple(admin_keys) or keys) if is_admin(path) else clients
        given: list[str | None] = [*_keys_in(scope)] or [None]
        right = [key for key in given if allowed(key, needed)]  # all are compared, so that the time tells nothing
        if right:
            key, peer = right[0] if needed else None, (scope.get("client") or ("",))[0]
            orders = is_under_any(ORDERS, path)
            if not (admin_keys or open_orders) and (orders or (is_under_any(LOCAL, path) and _is_abroad(scope, peer))):
                return await _refuse(Forbidden(CLOSED if orders else CLOSED_ABROAD), scope, receive, send)
            try:
                owner.take(key, peer, trusted=trusted, name=Headers(scope=scope).get(owner.HEADER))
            except BadRequest as error:
                return await _refuse(error, scope, receive, send)
            return await app(scope, receive, send)
        if clients and True in [allowed(key, clients) for key in given]:
            return await _refuse(Forbidden("this route asks for the admin key (--admin-key)."), scope, receive, send)
        failure = Unauthenticated('no valid API key was given; send it as "Authorization: Bearer <key>".')
        scheme = "Basic" if is_admin(path) and scope["method"] == "GET" else "Bearer"
        await _refuse(failure, scope, receive, send, {"WWW-Authenticate": f'{scheme} realm="ridgeline"'})

    return run


def with_draining(app: ASGIApp, admission: Admission) -> ASGIApp:
    """Refuse new requests and keep no connection while the server ends."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and admission.draining:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if admission.draining and route_path(scope) not in WHILE_DRAINING:
            failure = Unavailable("the server is shutting down; send the request to another.", retry_after=5)
            return await _refuse(failure, scope, receive, closing)
        await app(scope, receive, closing)

    return run


def with_whole_body(app: ASGIApp, limit: int, uploads: int = 0, sounds: int = 0) -> ASGIApp:
    """Hand each route its body in one piece. Never read more than `limit` bytes of it.

    Bodies of the routes in UPLOADS come in pieces, as they arrive, and may have `uploads` bytes, if that is not 0.
    Those of the routes in SOUNDS likewise, with `sounds` bytes.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        post, path = scope["method"] == "POST", route_path(scope)
        most, flag, upload = limit, "--max-body-bytes", False
        if uploads and post and path in UPLOADS:
            most, flag, upload = uploads, "--batch-file-bytes", True
        elif sounds and post and path in SOUNDS:
            most, flag, upload = sounds, "--audio-file-bytes", True
        too_large = BodyTooLarge(f"the body is longer than {most} bytes ({flag}); send less.")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            return await _refuse(too_large, scope, receive, send)
        pieces = paced(receive, most, too_large)
        if upload:
            if "idempotency-key" in Headers(scope=scope):
                failure = BadRequest("an upload takes no Idempotency-Key; leave it out.")
                return await _refuse(failure, scope, receive, send)
            return await app(scope, pieces, send)
        body, more = BytesIO(), True  # of which the bytes are taken without a copy
        while more:
            try:
                message = await pieces()
            except RequestFailed as failure:
                headers = {"Connection": "close"} if isinstance(failure, TimedOut) else None
                return await _refuse(failure, scope, receive, send, headers)
            if message["type"] == "http.disconnect":
                return
            body.write(message.get("body", b""))
            more = message.get("more_body", False)
        whole: Message = {"type": "http.request", "body": body.getvalue(), "more_body": False}
        pieces = replayed(whole, receive)
        del body, whole
        await app(scope, pieces, send)

    return run


def paced(receive: Receive, limit: int, too_large: BodyTooLarge) -> Receive:
    """Return a `receive` for a body of at most `limit` bytes that must not come too slowly. It raises `too_large`, or
    TimedOut."""
    began, size, over = time.monotonic(), 0, False

    async def pull() -> Message:
        nonlocal size, over
        if over:
            return await receive()
        left = began + BODY_TIMEOUT + size / BODY_PACE - time.monotonic()
        try:
            async with asyncio.timeout(min(left, BODY_TIMEOUT)):
                message = await receive()
        except TimeoutError:
            late = time.monotonic() - began
            raise TimedOut(f"the body was not complete in time: {size} bytes came in {late:.0f} s.") from None
        size += len(message.get("body", b""))
        over = not message.get("more_body", False)
        if size > limit:
            raise too_large
        return message

    return pull


def _is_abroad(scope: Scope, peer: str) -> bool:
    """Return True if a request came from another machine, or may have."""
    headers = Headers(scope=scope)
    return peer not in LOOPBACK or any(name in headers for name in FORWARDED)


def is_admin(path: str) -> bool:
    return is_under_any(ADMIN, path)


def is_under_any(paths: Sequence[str], path: str) -> bool:
    return any(is_under(each, path) for each in paths)


def _keys_in(scope: Scope) -> Iterator[str]:
    """Yield the keys that the request offers.

    Browsers can bring a key as the password of their own dialog. They then add it to requests from any page, so it
    counts only for requests that change nothing, or come from no browser: those name no page (trainers give the key in
    the server's address).
    """
    headers = Headers(scope=scope)
    authorization = headers.get("authorization")
    if (key := bearer(authorization)) is not None:
        yield key
    if (key := headers.get("x-api-key")) is not None:
        yield key
    browser = "origin" in headers or "referer" in headers or any(name.startswith("sec-fetch-") for name in headers)
    if (scope["method"] in ("GET", "HEAD") or not browser) and (key := _password(authorization)) is not None:
        yield key


def _password(authorization: str | None) -> str | None:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[2] or None
    except (binascii.Error, ValueError):
        return None


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _refuse(
    failure: RequestFailed, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] | None = None
) -> None:
    response = response_for(failure, scope)
    response.headers.update(headers or {})
    if _has_body(scope):
        response.headers["connection"] = "close"  # otherwise the body that still comes would have to be awaited
    await response(scope, receive, send)


def _log(scope: Scope, name: str, status: int, seconds: float) -> None:
    raw = scope.get("raw_path")
    path = raw.decode("ascii", "replace") if raw else quote(scope["path"])
    client = (scope.get("client") or ("-",))[0]
    level = logging.DEBUG if route_path(scope) in HEALTH and status == 200 else logging.INFO
    access.log(
        level,
        "%s %s %s %d in %.3f s (%s)",
        client,
        scope["method"],
        path,
        status,
        seconds,
        name,
        extra={
            "request_id": name,
            "client": client,
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
        },
    )
