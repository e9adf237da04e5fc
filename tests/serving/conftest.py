"""One real engine process on the embedded model for all tests of the server, and API servers that talk to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import uvicorn

from ridgeline.assembly import assemble
from ridgeline.core.settings.adapters import NamedAdapter
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.generation.engine_client import EngineClient
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.http.wire_bounds import BoundedProtocol
from ridgeline.serving.processes.api_server_process import KEEP_ALIVE
from ridgeline.serving.processes.engine_host import EngineHost
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.serving.processes.lifeline import READY
from ridgeline.transport.zmq import EngineSocket
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.forks import forking

MODEL = "embedded"
DTYPE = "float32"  # where batches that differ, as they do on a busy machine, change the last bits only
PATIENCE = 120.0  # seconds for what takes a moment where nothing else runs
_names = itertools.count(1)


def start_engine(socket: Path, *, life: int = 1, **options: object) -> subprocess.Popen[bytes]:
    """An engine process that API servers can reach; closing its standard input ends it. Fails with what it said where
    it ends instead."""
    command = [sys.executable, "-m", "ridgeline.serving.processes.engine_process"]
    with forking():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    options = {"dtype": DTYPE} | options
    settings = {"socket": str(socket), "options": options, "served_name": MODEL, "life": life}
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    said = process.stdout.readline().decode().strip()
    if said != READY:
        stop_engine(process)
        pytest.fail(f"the engine did not start: {said or 'its standard error says why'}")
    return process


def stop_engine(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


@contextmanager
def engine_in_a_thread(
    socket: Path, adapters: tuple[NamedAdapter, ...] = (), most_adapters: int = 0, **options: object
) -> Iterator[None]:
    """An engine for API servers in a thread of this process, which needs no new one that imports everything first."""
    known = {"device": "cpu", "dtype": DTYPE} | options
    settings = EngineSettings(
        socket=str(socket),
        options=known,
        served_name=MODEL,
        adapters=adapters,
        most_adapters=most_adapters,
        most_adapter_bytes=1 << 30,
    )
    config = LLMConfig(**known)  # type: ignore[arg-type]
    host = EngineHost(assemble(config), config, EngineSocket(str(socket)), settings)
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    yield
    host.stop()
    thread.join(PATIENCE)


@asynccontextmanager
async def open_api_server(socket: Path, config: ServeConfig | None = None) -> AsyncIterator[ApiServer]:
    """An API server whose engine answers."""
    probe = EngineClient(str(socket), f"probe-{next(_names)}", buffer=1)
    running = asyncio.create_task(probe.run())
    facts = await asyncio.wait_for(probe.wait_until_up(), PATIENCE)
    running.cancel()
    api = ApiServer.build(
        config or ServeConfig(generation_config="none"),
        NamedModel(facts.folder, (MODEL,), (str(socket),)),
        name=f"test-face-{next(_names)}",
    )
    running = asyncio.create_task(api.client.run())
    try:
        await asyncio.wait_for(api.client.wait_until_up(), PATIENCE)
        yield api
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(scope="session")
def engine_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of the socket of an engine that all tests share; who kills engines starts one of his own."""
    socket = tmp_path_factory.mktemp("engine") / "socket"
    process = start_engine(socket, enable_prompt_embeds=True, max_logprobs=-1)
    yield socket
    stop_engine(process)


@pytest.fixture
def api_server_of(engine_socket: Path) -> Callable[..., AbstractAsyncContextManager[ApiServer]]:
    """`async with api_server_of() as api`, or with a `ServeConfig`."""
    return lambda config=None: open_api_server(engine_socket, config)


async def until_idle(api: ApiServer, timeout: float) -> bool:
    """True once the engine runs nothing of this API server's, and nothing is counted as open; False if that takes
    longer."""
    try:
        async with asyncio.timeout(timeout):
            while True:
                stats, admission = await api.client.ask(), api.service.admission
                if stats and not (stats.running or stats.waiting or admission.open_requests):
                    return api.client.num_open == 0 and admission.open_tokens == 0
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False


@dataclass
class Server:
    """An API server under uvicorn, in a thread of its own."""

    api: ApiServer
    url: str
    loop: asyncio.AbstractEventLoop

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def wait_idle(self, timeout: float = PATIENCE) -> bool:
        """True once the engine runs nothing of this API server's."""

        return asyncio.run_coroutine_threadsafe(until_idle(self.api, timeout), self.loop).result()


StartServer = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def start_server(engine_socket: Path) -> StartServer:
    """`with start_server(**settings of ServeConfig) as server:`, on an engine of one's own if that is given."""

    @contextmanager
    def start(
        folder: Path = EMBEDDED_MODEL,
        engine: Path = engine_socket,
        adapters: tuple[NamedAdapter, ...] = (),
        engine_options: dict[str, object] | None = None,
        **settings: object,
    ) -> Iterator[Server]:
        listener = sockets.create_server(("127.0.0.1", 0))
        # Small, for connections too: who does not read is noticed before megabytes wait for him.
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, 1 << 16)
        started, servers, failures = threading.Event(), list[Server](), list[BaseException]()
        # As `LLM` with explicit parameters, which is what answers are compared with.
        config = ServeConfig(**{"generation_config": "none", "engine": engine_options or {}, **settings})  # type: ignore[arg-type]

        async def main() -> None:
            model = NamedModel(str(folder), (MODEL, "alias"), (str(engine),), adapters)
            api = ApiServer.build(config, model, f"http-face-{next(_names)}")
            listening = asyncio.create_task(api.client.run())
            await api.client.wait_until_up()
            servers.append(Server(api, f"http://127.0.0.1:{listener.getsockname()[1]}", asyncio.get_running_loop()))
            started.set()
            await server.serve(sockets=[listener])
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as failure:
                failures.append(failure)
                started.set()
                raise

        async def application(scope, receive, send):  # type: ignore[no-untyped-def]
            nonlocal app
            app = app or wrap(create_app(servers[0].api), servers[0].api)
            await app(scope, receive, send)

        app = None
        server = uvicorn.Server(
            uvicorn.Config(
                application,
                http=BoundedProtocol,
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(PATIENCE), "the engine did not answer"
        assert not failures, failures
        try:
            yield servers[0]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            listener.close()

    return start


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[Server]:
    with start_server(open_admin_routes=True) as running:
        yield running
