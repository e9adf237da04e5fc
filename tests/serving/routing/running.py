"""Workers in processes of their own, and routers before them in threads of this one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn

from ridgeline.core.settings.routing import RouteConfig
from ridgeline.serving.processes.api_server_process import Server
from ridgeline.serving.router.app import RouterApp
from ridgeline.serving.router.run import uvicorn_config

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0  # seconds for what takes a moment where nothing else runs
INTERVAL = 0.1  # seconds between looks


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


class HeldPort(socket.socket):
    """A port that no other process is given while this is open, and on which a server of ours may listen."""

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", 0))

    @property
    def number(self) -> int:
        return int(self.getsockname()[1])


class FakeWorker:
    """A process of `worker.py`. pair: the key and the certificate of one that speaks TLS."""

    def __init__(self, models: str = "m", pair: tuple[str, str] | None = None) -> None:
        self._held, self._models, self._pair = HeldPort(), models, pair
        self.port = self._held.number
        self.url = f"http{'s' if pair else ''}://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.serving.routing.worker", str(self.port), self._models]
        command += self._pair or ()
        self.process = subprocess.Popen(command, cwd=ROOT)
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", verify=False).status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None
            return False

    def counted(self) -> dict[str, int]:
        return dict(httpx.get(f"{self.url}/counted").json())

    def go(self, times: int = 1) -> None:
        """Let it write so many events more of the requests that are led."""
        for _ in range(times):
            httpx.post(f"{self.url}/go")

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it for good."""
        self.end()
        self._held.close()


class RunningRouter:
    """A router in a thread."""

    def __init__(self, config: RouteConfig) -> None:
        self.app, self._held = RouterApp(config), HeldPort()
        self.port = self._held.number
        self.url = f"http{'s' if config.ssl_certfile else ''}://127.0.0.1:{self.port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        wait_for(self.up)

    async def _run(self) -> None:
        config = uvicorn_config(self.app)
        config.port = self.port
        server: uvicorn.Server = Server(config)
        watching, serving = asyncio.create_task(self.app.workers.watch()), asyncio.create_task(server.serve())
        while not self._stop.is_set():
            await asyncio.sleep(0.02)
        server.force_exit = server.should_exit = True
        await serving
        watching.cancel()
        await self.app.workers.close()

    def up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/live", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def ready(self) -> int:
        return len(self.app.workers.ready)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        self._held.close()


@contextmanager
def routing(*workers: FakeWorker, ready: bool = True, **settings: object) -> Iterator[RunningRouter]:
    """A router that is ready for all its workers."""
    given = {"health_interval": INTERVAL, "policy": "round-robin", "access_log": False, **settings}
    running = RunningRouter(RouteConfig(worker_urls=tuple(each.url for each in workers), **given))  # type: ignore[arg-type]
    try:
        if ready:
            wait_for(lambda: running.ready() == len(workers))
        yield running
    finally:
        running.end()
