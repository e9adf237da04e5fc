"""The server's first process. It holds the listening sockets, starts the engines and the API servers, keeps them alive,
and ends them. It loads no tensors and sees no requests.

Its children end by themselves when it ends, however that happens: each holds the other end of a pipe (lifeline.py). All
API servers accept from one inherited socket. Connections that a dead API server had not accepted wait for the others or
for its successor, and a port that someone else has is noticed before anything starts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from ridgeline.core.cores import of_helper
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.registry import listed
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.core.timeline import process_start
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.keys import tell_of_orders
from ridgeline.serving.processes.engine_settings import MODULE, EngineSettings, encode, patience_of
from ridgeline.serving.processes.keeper import ChildProcess, GaveUp, Keeper
from ridgeline.serving.processes.lifeline import LAST, GivenUp
from ridgeline.serving.processes.placement import environments
from ridgeline.serving.processes.runtime import RuntimeDirectory, allow_descriptors
from ridgeline.serving.stored.store import Store

logger = logging.getLogger(__name__)

MARGIN = 10.0  # seconds that a process has for its end, beyond what it was promised
BACKLOG = 2048
UNREAD = 75_000  # milliseconds that a client may leave data unread before its connection is reset
LAST_ANSWERS = 5.0  # seconds for API servers to answer waiting clients, when the server gives up


# glibc returns large pieces of memory at once, until it has seen one freed. Then it keeps pieces of up to 32 MiB in
# every thread's own store, and after some bodies of that size an API server held three times its memory.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}


class Supervisor:
    """The supervisor of one server.

    `models` are the models, of which several have the devices in turn, and the first begins. `app` is as in
    `ApiServerSettings`. Sockets are bound at once, so InvalidConfig or ModelLoadError is raised before any process
    starts.
    """

    def __init__(self, config: ServeConfig, models: Sequence[NamedModel], *, app: str | None = None) -> None:
        self._config, self._models, self._app = config, tuple(models), app
        self.names = tuple(name for model in models for name in model.names)
        self.quiet = False  # True: nothing is said on standard output
        self._clients: tuple[Keeper, ...] = ()  # of the processes that send requests to engines
        self._patience = patience_of(config)
        allow_descriptors()
        self._defaults = [
            GenerationDefaults.of(config.generation_config, Path(model.folder), config.override_generation_config)
            for model in models
        ]
        check_certificate(config)
        if config.batch_dir is not None:
            Store(Path(config.batch_dir), config.batch_dir_bytes)  # complains about a folder that cannot be used
        self._environments = environments(config)
        with ExitStack() as opened:
            if config.uds is None:
                self._listener = opened.enter_context(listen(config.host, config.port))
                self.port: int = self._listener.getsockname()[1]
            else:
                self._listener = opened.enter_context(listen_on_path(config.uds))
                opened.callback(Path(config.uds).unlink, missing_ok=True)
                self.port = 0
            self.grpc_port: int | None = None
            if config.grpc_port is not None:
                shared = config.api_server_count > 1
                self._reserved = opened.enter_context(reserve(config.host, config.grpc_port, shared=shared))
                self.grpc_port = self._reserved.getsockname()[1]
                if not shared:
                    self._reserved.close()  # the one API server binds the port alone
            self._kept_open = opened.pop_all()

    def run(self) -> int:
        """Run until a signal, or until an end that no restart mends. Return the exit code."""
        try:
            directory = RuntimeDirectory()
        except InvalidConfig:
            self._kept_open.close()
            raise
        try:
            return asyncio.run(self._run(directory))
        finally:
            self._kept_open.close()
            directory.remove()

    async def _run(self, directory: RuntimeDirectory) -> int:
        replicas = range(self._config.data_parallel_size)
        count = len(replicas)
        models = [
            replace(model, sockets=tuple(str(directory.socket(place * count + each)) for each in replicas))
            for place, model in enumerate(self._models)
        ]
        turns = [str(directory.turn(replica)) for replica in replicas] if len(models) > 1 else []
        engines = self._engines(models, turns)
        api_servers = [*self._api_servers(models, turns), *self._batches(models[0])]
        self._clients = tuple(api_servers)
        everyone = [*engines, *api_servers]
        for line in listed():
            logger.info("plugin: %s, imported when its name is asked for", line)
        signals: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        lives = {keeper: asyncio.create_task(keeper.keep()) for keeper in everyone}
        ready = asyncio.create_task(self._announce(everyone))
        try:
            asked = asyncio.create_task(signals.get())
            await asyncio.wait({asked, *lives.values()}, return_when=asyncio.FIRST_COMPLETED)
            for life in lives.values():
                if life.done():
                    life.result()
            logger.info("shutting down; a second signal ends everything at once")
            again = asyncio.create_task(signals.get())
            drained = asyncio.create_task(self._drain(engines, api_servers, lives))
            await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if drained.done() else 128 + again.result()
        except GaveUp as reason:
            with suppress(OSError):
                print(f"ridgeline: {reason}", file=sys.stderr)
            if any(engine.ready.is_set() for engine in engines):
                await self._answer_all([lives[api] for api in api_servers], api_servers)
            return reason.code
        finally:
            ready.cancel()
            for keeper in everyone:
                keeper.kill()
            await asyncio.gather(*lives.values(), return_exceptions=True)

    async def _drain(
        self, engines: list[Keeper], api_servers: list[Keeper], lives: dict[Keeper, asyncio.Task[None]]
    ) -> None:
        """End the API servers first, because they need the engines for the requests that still run."""
        self._kept_open.close()  # only the API servers hold the port now
        for api in api_servers:
            api.stop()
        await asyncio.wait([lives[api] for api in api_servers], timeout=self._config.shutdown_timeout + MARGIN)
        for api in api_servers:
            api.kill()
        for engine in engines:
            engine.stop()
        await asyncio.wait([lives[engine] for engine in engines], timeout=MARGIN)

    async def _answer_all(self, lives: list[asyncio.Task[None]], api_servers: list[Keeper]) -> None:
        """Let API servers tell waiting clients that nothing more comes."""
        self._kept_open.close()
        for api in api_servers:
            api.stop(LAST)
        await asyncio.wait(lives, timeout=LAST_ANSWERS)

    def _engines(self, models: Sequence[NamedModel], turns: Sequence[str]) -> list[Keeper]:
        """Return the keepers of the engines. The replicas of a model can do one another's work. Those of several models
        load one after the other, the first model's at last, since it begins."""
        found: list[Keeper] = []
        for model in (*models[1:], models[0]):
            found += self._engines_of(model, turns, asleep=model is not models[0], after=found[-len(model.sockets) :])
        return found

    def _engines_of(
        self, model: NamedModel, turns: Sequence[str], *, asleep: bool, after: Sequence[Keeper]
    ) -> list[Keeper]:
        config, replicas = self._config, len(model.sockets)
        engines: list[Keeper] = []
        name = f"engine of {model.names[0]}" if turns else "engine"
        names = [name] if replicas == 1 else [f"{name} {index}" for index in range(replicas)]

        def settings_of(index: int) -> Callable[[int], bytes]:
            own = EngineSettings.of(config, model, index)
            own.name = names[index] if replicas > 1 or turns else ""
            own.turn, own.began = turns[index] if turns else None, process_start()
            return lambda life: encode(structs.replace(own, life=life, asleep=asleep and life == 1))

        def needless(index: int) -> Callable[[], bool]:
            """Return a function that is true while the server can go on without this engine: with several models, or
            while another engine works."""
            return lambda: bool(turns) or any(engine.works for engine in engines if engine is not engines[index])

        for index, environment in enumerate(self._environments):
            before = after[index] if after else None
            child = ChildProcess(names[index], MODULE, settings_of(index), environment=environment)
            engines.append(Keeper(child, needless(index), before, self._patience, self._tell_hung))
        return engines

    def _tell_hung(self, process_id: int, why: str) -> None:
        """Let all that send requests to an engine take it for dead, before it is."""
        line = msgspec.json.encode(GivenUp(process_id, why)) + b"\n"
        for keeper in self._clients:
            keeper.tell(line)

    def _api_servers(self, models: Sequence[NamedModel], turns: Sequence[str]) -> list[Keeper]:
        config, fd = self._config, self._listener.fileno()
        settings = {
            "config": config,
            "models": models,
            "turns": turns,
            "listener": fd,
            "grpc_address": None if self.grpc_port is None else address(config.host, self.grpc_port),
            **({} if self._app is None else {"app": self._app}),
        }

        def settings_of(index: int) -> Callable[[int], bytes]:
            return lambda life: encode({**settings, "name": f"face-{index}-{life}", "life": life, "place": index})

        return [
            Keeper(
                ChildProcess(
                    f"API server {index}",
                    "ridgeline.serving.processes.api_server_process",
                    settings_of(index),
                    (fd,),
                    GIVEN_BACK | os.environ | of_helper(config.api_server_count),
                ),
                patience=self._patience,
            )
            for index in range(1, config.api_server_count + 1)
        ]

    def _batches(self, model: NamedModel) -> list[Keeper]:
        """Return the keeper of the process that runs batches, if there are any. Without it the others go on."""
        if self._config.batch_dir is None:
            return []
        settings = {"config": self._config, "model": model}
        module = "ridgeline.serving.processes.batch_process"
        child = ChildProcess(
            "runner of batches",
            module,
            lambda life: encode({**settings, "name": f"batches-{life}"}),
            environment=GIVEN_BACK | os.environ | of_helper(self._config.api_server_count),
        )
        return [Keeper(child, lambda: True, patience=self._patience)]

    async def _announce(self, everyone: list[Keeper]) -> None:
        """Print one line on standard output, once requests find an answer."""
        for keeper in everyone:
            await keeper.ready.wait()
        scheme = "https" if self._config.ssl_keyfile else "http"
        where = address(self._config.host, self.port) if self._config.uds is None else f"unix:{self._config.uds}"
        urls = f"{scheme}://{where}{self._config.root_path}"
        if self.grpc_port is not None:
            urls += f" and grpc://{address(self._config.host, self.grpc_port)}"
        if not self.quiet:
            tell_of_orders(self._config)
            with suppress(OSError):  # such as a full disk
                print(f"Ready: {', '.join(self.names)} at {urls}", flush=True)
        for model, defaults in zip(self._models, self._defaults, strict=True):
            if told := str(defaults):
                whose = f" of {model.names[0]}" if len(self._models) > 1 else ""
                logger.info("a request%s that leaves them out gets %s (--generation-config none: plain)", whose, told)


def check_certificate(config: ServeConfig) -> None:
    """Raise InvalidConfig if HTTPS is wanted and its certificate cannot be used."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # an empty password, so that it never asks for one
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=config.ssl_keyfile_password or "")
    except (OSError, ValueError) as error:
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise InvalidConfig(f"{files} cannot be used as certificate and key ({error}).") from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"ssl_ca_certs {config.ssl_ca_certs} cannot be used ({error}).") from error
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError as error:
        raise InvalidConfig(f"ssl_ciphers {config.ssl_ciphers!r} names no cipher of OpenSSL's.") from error
    if config.grpc_port is not None and (config.ssl_keyfile_password or config.ssl_ciphers):
        raise InvalidConfig("gRPC takes neither ssl_keyfile_password nor ssl_ciphers; leave them or grpc_port out.")


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise InvalidConfig if the address cannot be bound."""
    bound = _bind(host, port)
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _complaint(host, port, error) from error
    return bound


def listen_on_path(path: str) -> socket.socket:
    """Return a listening Unix socket. One that a dead server left there is replaced. Raise InvalidConfig."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and bound.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
            bound.close()
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InvalidConfig(f"cannot listen on the socket {path!r} ({error}); choose another path.") from error
    bound.setblocking(False)
    return bound


def reserve(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket bound to a port that is free now. Raise InvalidConfig if there is none.

    If `shared`, the port stays ours, for several processes that listen on it.
    """
    free = _bind(host, port)
    if not shared:
        return free
    port = free.getsockname()[1]
    free.close()  # only this first bind tells whether someone else has the port
    return _bind(host, port, reuse_port=True)


def _bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _complaint(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD)  # accepted connections inherit this
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise _complaint(host, port, error) from error
    bound.setblocking(False)
    return bound


def _complaint(host: str, port: int, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"cannot listen on port {port} of {host!r} ({error.strerror}); choose another host or port.")
