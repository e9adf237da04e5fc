"""The router's process: one event loop, a listening socket, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import Counter
from functools import partial
from typing import Any

import uvicorn
import uvloop

from ridgeline.core.collector import freeze_heap
from ridgeline.core.settings.routing import RouteConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.errors import Overloaded
from ridgeline.serving.http.wire_bounds import BoundedProtocol
from ridgeline.serving.processes.api_server_process import FLUSH, KEEP_ALIVE, LOOK, Server
from ridgeline.serving.processes.logs import set_up_logging
from ridgeline.serving.processes.runtime import allow_descriptors
from ridgeline.serving.processes.supervisor import check_certificate, reserve
from ridgeline.serving.router.app import RouterApp

logger = logging.getLogger("ridgeline.router")


class CountedProtocol(BoundedProtocol):
    """A connection that counts among those of its client's address. One beyond the bound is refused."""

    def __init__(self, *args: Any, counted: Counter[str], most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted, self._most, self._peer = counted, most, ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        self._counted[self._peer] += 1
        if self._most and self._counted[self._peer] > self._most:
            bound = f"{self._most} connections (--max-connections-per-client)"
            self._end(Overloaded(f"this address has {bound} open already; close some."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted[self._peer] -= 1
        if self._counted[self._peer] <= 0:
            del self._counted[self._peer]
        super().connection_lost(exc)


def run(config: RouteConfig) -> None:
    """Route until SIGTERM or SIGINT, and then until the requests under way have ended. Raise InvalidConfig."""
    set_up_logging(as_json=config.log_json, level=config.log_level)
    for noisy in ("uvicorn", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    key, file, password = config.ssl_keyfile, config.ssl_certfile, config.ssl_keyfile_password
    check_certificate(ServeConfig(ssl_keyfile=key, ssl_certfile=file, ssl_keyfile_password=password))
    app = RouterApp(config)
    allow_descriptors()
    listener = reserve(config.host, config.port, shared=False)
    uvloop.run(serve(app, listener))


async def serve(app: RouterApp, listener: socket.socket) -> None:
    """Serve the application on a bound socket until SIGTERM or SIGINT."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(uvicorn_config(app))
    watching = asyncio.create_task(app.workers.watch())
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    host, port = listener.getsockname()[:2]
    where = f"{'https' if app.config.ssl_certfile else 'http'}://{host}:{port}"
    logger.info("routing to %d servers by %s on %s", len(app.workers.each), app.config.policy, where)
    freeze_heap()
    await asyncio.wait({watching, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (watching, serving):
        if task.done():
            task.result()
    await drain(app)
    server.should_exit = True
    await serving
    watching.cancel()
    await app.workers.close()


async def drain(app: RouterApp) -> None:
    """Take no more requests, wait until those under way have ended, and end the others after a time."""
    loop, seconds = asyncio.get_running_loop(), app.config.shutdown_timeout
    app.draining, deadline = True, loop.time() + seconds
    logger.info("draining: %d requests run, for at most %g s more", app.workers.num_open, seconds)
    while app.workers.num_open and loop.time() < deadline:
        await asyncio.sleep(LOOK)
    if left := app.workers.num_open:
        logger.warning("%d requests have not ended in %g s and are cut", left, seconds)
        app.end_all()


def uvicorn_config(app: RouterApp) -> uvicorn.Config:
    """Return the settings with which uvicorn serves the application."""
    protocol: Any = partial(CountedProtocol, counted=Counter[str](), most=app.config.max_connections_per_client)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could name an address that is not its own
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=FLUSH,
        ssl_keyfile=app.config.ssl_keyfile,
        ssl_certfile=app.config.ssl_certfile,
        ssl_keyfile_password=app.config.ssl_keyfile_password,
    )
