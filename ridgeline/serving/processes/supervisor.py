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
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline.core.serving import NamedModel, ServeConfig
from ridgeline.serving.batches.store import Store
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.processes.lifeline import LAST, MISTAKE, MISTAKEN, READY
from ridgeline.serving.processes.placement import environments
from ridgeline.serving.processes.runtime import RuntimeDirectory, allow_descriptors

logger = logging.getLogger(__name__)

MOST_FAILURES = 5  # quick failures in a row
LONGEST_WAIT = 60.0  # seconds between tries of a process that others stand in for
STEADY = 30.0  # seconds of work after which a death is not a quick failure
MARGIN = 10.0  # seconds that a process has for its end, beyond what it was promised
BACKLOG = 2048
UNREAD = 75_000  # milliseconds that a client may leave data unread before its connection is reset
LAST_WORDS = 1.0  # seconds to read what an ended process had still written
LAST_ANSWERS = 5.0  # seconds for API servers to answer those who wait, when the server gives up


# glibc returns large pieces of memory at once, until it has seen one freed. Then it keeps pieces of up to 32 MiB in
# every thread's own store, and after some bodies of that size an API server held three times its memory.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}


class GaveUp(RidgelineError):
    """Raised when the server cannot go on. `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Keeper:
    """A keeper of one process, which it starts again when that dies.

    `settings` returns what the process reads from standard input, by the number of its life. The process inherits
    `fds`. `environment` holds its variables. `needless` returns True while others do this process's work: then it is
    tried again for ever, if it was ever ready. `after` is the keeper of one that must be ready before this one begins.
    """

    def __init__(
        self,
        name: str,
        module: str,
        settings: Callable[[int], bytes],
        fds: tuple[int, ...] = (),
        environment: Mapping[str, str] = os.environ,
        needless: Callable[[], bool] = lambda: False,
        after: Keeper | None = None,
    ) -> None:
        self.name, self._module, self._settings, self._fds = name, module, settings, fds
        self._environment, self._needless, self._after = environment, needless, after
        self.ready = asyncio.Event()  # set once it was ready for the first time
        self._process: subprocess.Popen[bytes] | None = None
        self._began: float | None = None  # since when this life has worked
        self._mistake = ""  # the mistake that ended it
        self._stopping = asyncio.Event()

    @property
    def works(self) -> bool:
        return self._began is not None

    async def keep(self) -> None:
        """Keep the process alive until `stop`.

        Raise GaveUp after MOST_FAILURES quick failures in a row, or if its first life ends with the user's mistake.
        """
        if self._after is not None:
            await _first_of(self._after.ready, self._stopping)
        failures, life = 0, 0
        while not self._stopping.is_set():
            life += 1
            code, seconds = await self._live(life)
            if self._stopping.is_set():
                return
            if code == MISTAKE and not self.ready.is_set():
                raise GaveUp(self._mistake or f"the {self.name} could not be started.", MISTAKE)
            failures = 1 if seconds >= STEADY else failures + 1
            if failures >= MOST_FAILURES and not (self.ready.is_set() and self._needless()):
                raise GaveUp(f"the {self.name} {how(code)}, {failures} times in a row; giving up.", 1)
            delay = back_off(failures)
            logger.error("the %s %s; it is started again in %g s", self.name, how(code), delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end, and start no other."""
        self._stopping.set()
        if self._process is not None:
            self._process.send_signal(number)  # does nothing to a process that has ended

    def kill(self) -> None:
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    async def _live(self, life: int) -> tuple[int, float]:
        """Run one life. Return its exit code and how long it worked."""
        process = self._process = subprocess.Popen(
            [sys.executable, *_same_path(), "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._fds,
            env=self._environment,
            bufsize=0,
            process_group=0,  # Ctrl+C reaches the supervisor alone, which then ends its children one after the other
        )
        assert process.stdin is not None
        assert process.stdout is not None
        told = asyncio.create_task(self._listen(process.stdout))
        try:
            with suppress(BrokenPipeError):  # it may be dead already
                process.stdin.write(self._settings(life) + b"\n")
            await _end_of(process)
            await asyncio.wait([told], timeout=LAST_WORDS)
        finally:
            told.cancel()
            await asyncio.wait([told])
            process.stdin.close()
            process.stdout.close()
        worked = 0.0 if self._began is None else time.monotonic() - self._began
        self._began = None
        return process.wait(), worked

    async def _listen(self, output: IO[bytes]) -> None:
        """Read what the process writes to standard output. The end of this output does not tell when the process ends,
        because its own children may hold it open for longer."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        async for line in reader:
            if line.strip() == READY.encode():
                self._began = time.monotonic()
                self.ready.set()
            else:
                said = line.decode(errors="replace").rstrip()
                if said.startswith(MISTAKEN):
                    self._mistake = said.removeprefix(MISTAKEN)
                if not said.startswith(MISTAKEN) or self.ready.is_set():
                    print(said, file=sys.stderr)


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
        everyone = [*engines, *api_servers]
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
        """Let API servers tell whoever waits that nothing more comes."""
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
        settings = {
            "options": {**config.engine, "model": model.folder},
            "served_name": model.names[0],
            "grammar_timeout": config.grammar_timeout,
            "log_json": config.log_json,
            "log_level": config.log_level,
        }
        engines: list[Keeper] = []
        name = f"engine of {model.names[0]}" if turns else "engine"
        names = [name] if replicas == 1 else [f"{name} {index}" for index in range(replicas)]

        def settings_of(index: int) -> Callable[[int], bytes]:
            own: dict[str, Any] = {"socket": model.sockets[index]}
            own |= {"name": names[index]} if replicas > 1 or turns else {}
            own |= {"turn": turns[index]} if turns else {}
            return lambda life: encode({**settings, **own, "life": life, "asleep": asleep and life == 1})

        def needless(index: int) -> Callable[[], bool]:
            """Other models are worth more than an end of the whole server."""
            return lambda: bool(turns) or any(engine.works for engine in engines if engine is not engines[index])

        module = "ridgeline.serving.processes.engine_process"
        for index, environment in enumerate(self._environments):
            before = after[index] if after else None
            engines.append(Keeper(names[index], module, settings_of(index), (), environment, needless(index), before))
        return engines

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
            return lambda life: encode({**settings, "name": f"face-{index}-{life}", "place": index})

        return [
            Keeper(
                f"API server {index}",
                "ridgeline.serving.processes.api_server_process",
                settings_of(index),
                (fd,),
                GIVEN_BACK | os.environ,
            )
            for index in range(1, config.api_server_count + 1)
        ]

    def _batches(self, model: NamedModel) -> list[Keeper]:
        """Return the keeper of the process that runs batches, if there are any. Without it the others go on."""
        if self._config.batch_dir is None:
            return []
        settings = {"config": self._config, "model": model}
        module = "ridgeline.serving.processes.batch_process"
        return [
            Keeper(
                "runner of batches",
                module,
                lambda life: encode({**settings, "name": f"batches-{life}"}),
                (),
                GIVEN_BACK | os.environ,
                lambda: True,
            )
        ]

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
            print(f"Ready: {', '.join(self.names)} at {urls}", flush=True)
        for model, defaults in zip(self._models, self._defaults, strict=True):
            if told := str(defaults):
                whose = f" of {model.names[0]}" if len(self._models) > 1 else ""
                logger.info("a request%s that leaves them out gets %s (--generation-config none: plain)", whose, told)


def _same_path() -> list[str]:
    """Return the option that keeps the current folder off a child's module path if it is not on ours. Otherwise modules
    there could hide others from the child."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def how(code: int) -> str:
    """Describe in words how a process ended."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def back_off(failures: int) -> float:
    """Return the seconds to wait after so many quick failures in a row: 0, 1, 2, 4, … and at most LONGEST_WAIT."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 16), LONGEST_WAIT)


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


def encode(settings: dict[str, Any]) -> bytes:
    return msgspec.json.encode(settings, enc_hook=str)
