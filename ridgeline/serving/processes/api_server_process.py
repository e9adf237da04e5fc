"""The process of an API server. It serves REST on a socket that it inherits, and gRPC on an address.

    python -m ridgeline.serving.processes.api_server_process < settings

It reads one JSON object (`ApiServerSettings`) from standard input and ends when that closes, because then its parent is
gone. It says `ready` on standard output once it serves and an engine has answered. SIGTERM drains it, and SIGUSR1 ends
it as soon as every request has its answer, if only that there is none.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from ridgeline.core.collector import freeze_heap
from ridgeline.core.errors import RidgelineError
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.batches.call import call
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.generation.turns import Turns
from ridgeline.serving.http.by_model import by_model
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.http.wire_bounds import BoundedProtocol
from ridgeline.serving.processes.lifeline import (
    LAST,
    GivenUp,
    Parent,
    begin,
    tell_mistake,
    tell_ready,
)
from ridgeline.serving.processes.logs import set_up_logging
from ridgeline.serving.processes.pulse import Pulse, turn_with_loop
from ridgeline.serving.processes.turn import Turn, waits

logger = logging.getLogger("ridgeline.serving.api_server")

APP = "ridgeline.serving.apis.app:create_app"
FLUSH = 3  # seconds that a client has to read the end of its answer while the server ends
KEEP_ALIVE = 75  # seconds that idle connections stay open: longer than proxies keep theirs
GREETING = 1.0  # seconds that an engine has to answer before clients get the error that there is none
LOOK = 0.05  # seconds between looks at the requests that still run


class ApiServerSettings(msgspec.Struct, kw_only=True):
    """The settings of an API server.

    `name` is unlike any other API server's, including earlier lives of this one, which `life` counts. `place` is its
    number. `turns` are the paths of the files that engines lock while they have the devices, where there are several
    models. `listener` is the file descriptor of the listening socket, and `grpc_address` is "host:port". `app` is the
    "module:function" that makes the app of an API server.
    """

    name: str
    life: int = 1
    place: int = 1
    config: ServeConfig
    models: tuple[NamedModel, ...]
    turns: tuple[str, ...] = ()
    listener: int
    grpc_address: str | None = None
    app: str = APP


class Server(uvicorn.Server):
    """uvicorn's server, with signals left to `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ApiServerSettings, pulse: Pulse, parent: Parent) -> None:
    """Serve until SIGTERM, and then until the requests under way have ended. Raise the error that broke the server."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    config = settings.config
    apis = ApiServer.build_all(config, settings.models, settings.name, settings.place)
    for api in apis:
        api.client.first &= settings.life == 1  # one that took another's place waits for no engine that died meanwhile
    parent.listen(lambda news: loop.call_soon_threadsafe(_give_up, apis, news))
    loop.add_signal_handler(LAST, _end_all, apis, stop)
    apps = [_create_app(settings.app)(api) for api in apis]
    for app in apps:
        await make_routes(app)
    server = Server(_uvicorn_config(wrap(by_model(apps, apis), apis[0]), config))
    async with apis[0].kept.listening():
        await _serve(apis, server, settings, stop, pulse)


def _give_up(apis: Sequence[ApiServer], news: GivenUp) -> None:
    for api in apis:
        api.client.give_up(news.process_id, news.why)


async def _serve(
    apis: Sequence[ApiServer], server: Server, settings: ApiServerSettings, stop: asyncio.Event, pulse: Pulse
) -> None:
    listener, api = socket.socket(fileno=settings.listener), apis[0]
    api.watchdog.start(asyncio.get_running_loop())
    works = [*(each.client.run() for each in apis), *_turns(apis, settings), turn_with_loop(pulse)]
    engines = asyncio.create_task(_together(works))
    for each in apis:
        each.chat_template.warm()
    if any(each.processor is not None for each in apis):
        api.media.warm()
    # a client that waited for an API server that died finds an engine behind its successor
    with suppress(TimeoutError):
        await asyncio.wait_for(api.client.wait_until_up(), GREETING)
    serving = asyncio.create_task(server.serve([listener]))
    grpc_server = await _start_grpc(api, settings.grpc_address)
    ready = asyncio.create_task(_announce(apis, server))
    stopping = asyncio.create_task(stop.wait())

    await asyncio.wait({engines, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    for task in (engines, serving):
        if task.done():
            task.result()
    await drain(apis, api.config.shutdown_timeout)
    server.should_exit = True
    if grpc_server is not None:
        await grpc_server.stop(FLUSH)
    await serving


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)


def _turns(apis: Sequence[ApiServer], settings: ApiServerSettings) -> list[Coroutine[Any, Any, None]]:
    """Return the tasks that give several models their turns, which is the first API server's work."""
    if not settings.turns or settings.place > 1:
        return []
    locks = [Turn(path) for path in settings.turns]
    waiting = [[Turn(waits(socket)) for socket in model.sockets] for model in settings.models]
    turns = Turns(
        [api.client for api in apis],
        [api.names[0] for api in apis],
        settings.config.model_turn,
        free=lambda: all(lock.free for lock in locks),
        starts=lambda place: not all(lock.free for lock in waiting[place]),
    )
    return [turns.run()]


async def drain(apis: Sequence[ApiServer], timeout: float) -> None:
    """Take no more requests, wait until those under way have ended, and after `timeout` seconds end the others."""

    def left() -> int:
        return sum(api.service.admission.open_requests for api in apis)

    for api in apis:
        api.service.admission.draining = True
    logger.info("draining: %d requests run, for at most %g s more", left(), timeout)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while left() and loop.time() < deadline:
        await asyncio.sleep(min(LOOK, max(0.0, deadline - loop.time())))
    if left():
        logger.warning("%d requests have not ended in %g s and are cut", left(), timeout)
        reason = f"the server shut down, and this request had not ended within {timeout:g} s; send it to another."
        for api in apis:
            api.client.end_all(Unavailable(reason, retry_after=5))


def _end_all(apis: Sequence[ApiServer], stop: asyncio.Event) -> None:
    for api in apis:
        api.service.admission.draining = True
        api.client.end_all(Unavailable("the server ends, and this request had not; send it to another.", retry_after=5))
    stop.set()


async def make_routes(app: ASGIApp) -> None:
    """Ask an application for a page that it does not have. FastAPI makes the forms of its routes at a first request,
    for which the event loop, and with it every client, would stand still for 0.1 to 0.2 s."""

    await call(app, "/none", b"", "", "")


def _uvicorn_config(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "TLSv1",  # uvicorn's own default: what Python allows
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=FLUSH,
    )


def _create_app(name: str) -> Callable[[ApiServer], ASGIApp]:
    module, _, function = name.partition(":")
    create: Callable[[ApiServer], ASGIApp] = getattr(importlib.import_module(module), function)
    return create


async def _start_grpc(api: ApiServer, address: str | None) -> Any:
    if address is None:
        return None
    from ridgeline.serving.apis.grpc.server import start  # takes 0.2 s, and most servers have no gRPC

    return await start(api, address)


async def _announce(apis: Sequence[ApiServer], server: uvicorn.Server) -> None:
    for api in apis:
        await api.client.wait_until_up()
    while not server.started or (len(apis) == 1 and apis[0].client.starting):
        await asyncio.sleep(LOOK)
    freeze_heap()
    tell_ready()


def main() -> None:
    settings, pulse, parent = begin(ApiServerSettings)
    set_up_logging(as_json=settings.config.log_json, level=settings.config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        uvloop.run(serve(settings, pulse, parent))
    except RidgelineError as error:
        tell_mistake(error)


if __name__ == "__main__":
    main()
