"""The servers to measure: one that runs, or one that is started here for the time it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline_bench.engines.vllm import ENVIRONMENT
from ridgeline_bench.runner import Where, tail

HOST = "127.0.0.1"
LOOK = 0.1  # seconds between looks at whether the server answers
END = 20.0  # seconds that the server has to end by itself
TAIL = 20  # lines of a log that are shown
KEYS = re.compile(r"(--(?:admin|api)-key[= ]+)\S+")

# A server takes more than one process; the rest is as when vLLM is measured offline.
VLLM_ENVIRONMENT = {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def without_keys(text: str) -> str:
    """Return flags with dots in the place of keys: labels are shown, and kept with results."""
    return KEYS.sub(r"\1…", text)


class StartFailed(RidgelineError):
    """A server did not come up."""


@dataclass(kw_only=True)
class Up:
    """A server to be measured. `model` is its name there ("": the first). `vocab_size` is 0 if the server has to tell.

    `seconds` is the time from its start to the first request it would have taken. `ended` says in words why it has
    ended, if it has.
    """

    url: str
    model: str = ""
    vocab_size: int = 0
    seconds: float = 0.0
    ended: Callable[[], str | None] = lambda: None


class Target(Protocol):
    """A server to measure. `label` names its curves; "" names them by what the server says of itself."""

    @property
    def label(self) -> str: ...

    def up(self, until: float) -> AbstractContextManager[Up]:
        """Yield the server while it is up, which must be before the monotonic moment `until`. Raise StartFailed."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A server that another program started."""

    url: str
    model: str = ""
    vocab_size: int = 0
    label: str = ""

    @contextmanager
    def up(self, until: float) -> Iterator[Up]:
        yield Up(url=self.url, model=self.model, vocab_size=self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The settings that all started servers have in common.

    `folder` and `name` are the model's and what clients call it. With `dummy` weights are random. `peer` has vLLM's
    Python and module path. `logs` is a folder for the servers' logs; without it a log is shown if its server fails.
    `timeout` is the seconds to come up.
    """

    folder: Path
    name: str
    vocab_size: int = 0
    dummy: bool = False
    peer: Where = field(default_factory=Where)
    logs: Path | None = None
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """A server of our choice. `flags` come beyond those that we give."""

    label: str
    engine: str
    flags: Sequence[str]
    site: Site

    @classmethod
    def parse(cls, texts: Sequence[str], site: Site) -> list[Start]:
        """Return the servers of the texts, each "ridgeline" or "vllm" followed by flags. Raise InvalidConfig."""
        found = []
        for text in texts:
            try:
                engine, *flags = shlex.split(text)
            except ValueError:
                engine, flags = "", []
            if engine not in COMMANDS:
                raise InvalidConfig(f"--start must be {' or '.join(COMMANDS)}, flags may follow; got {text!r}.")
            label = engine if [shlex.split(t)[:1] for t in texts].count([engine]) == 1 else without_keys(text)
            found.append(cls(label=label, engine=engine, flags=flags, site=site))
        return found

    def command(self, port: int) -> list[str]:
        return [*COMMANDS[self.engine](self.site, port), *self.flags]

    @contextmanager
    def up(self, until: float) -> Iterator[Up]:
        port, began = _free_port(), time.monotonic()
        with self._log() as log:
            process = subprocess.Popen(
                self.command(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # so that its child processes end with it
            )
            try:
                url = f"http://{HOST}:{port}"
                found = Up(url=url, model=self.site.name, vocab_size=self.site.vocab_size)
                found.ended = lambda: _death(process, log)
                self._wait(found, log, min(until, began + self.site.timeout))
                found.seconds = time.monotonic() - began
                yield found
            finally:
                _end(process)

    def _wait(self, server: Up, log: IO[bytes], until: float) -> None:
        began = time.monotonic()
        while not _healthy(f"{server.url}/health"):
            if (death := server.ended()) is not None:
                raise StartFailed(f"{self.label} {death}")
            if time.monotonic() > until:
                seconds = time.monotonic() - began
                raise StartFailed(f"{self.label} does not serve after {seconds:.0f} s.{tail(log, TAIL)}")
            time.sleep(LOOK)

    def _environment(self) -> dict[str, str]:
        if self.engine == "vllm":
            return {**VLLM_ENVIRONMENT, **self.site.peer.environment()}
        return Where().environment()

    @contextmanager
    def _log(self) -> Iterator[IO[bytes]]:
        if self.site.logs is None:
            with tempfile.TemporaryFile() as log:
                yield log
            return
        self.site.logs.mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "-" for c in self.label)
        with (self.site.logs / f"{name}.log").open("w+b") as log:
            yield log


def _death(process: subprocess.Popen[bytes], log: IO[bytes]) -> str | None:
    code = process.poll()
    return None if code is None else f"ended with exit code {code}.{tail(log, TAIL)}"


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM (of `timeout`, say) end the block like an error does, so that no server is left behind."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ridgeline(site: Site, port: int) -> list[str]:
    command = [sys.executable, "-m", "ridgeline", "serve", str(site.folder), "--host", HOST, "--port", str(port)]
    command += ["--served-model-name", site.name, "--no-access-log", "--log-level", "warning"]
    return [*command, "--load-format", "dummy"] if site.dummy else command


def _vllm(site: Site, port: int) -> list[str]:
    command = [site.peer.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(site.folder)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", site.name]
    command += ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    return [*command, "--load-format", "dummy"] if site.dummy else command


COMMANDS: dict[str, Callable[[Site, int], list[str]]] = {"ridgeline": _ridgeline, "vllm": _vllm}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process. Wait until it and all that it started are gone, because the next server needs its memory."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END)
    until = time.monotonic() + END
    while (left := _session(process.pid)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # otherwise it would stay as a zombie
        time.sleep(LOOK)


def _session(leader: int) -> list[int]:
    """Return the processes of the session that one of them began, itself included. They may be in groups of their
    own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(stat.parent.name))
    return found
