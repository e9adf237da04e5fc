"""`ridgeline serve` as a process of a script or a test, and what its processes hold."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

PATIENCE = 120.0  # seconds after which a request counts as hung


class Broken(Exception):
    """A promise was broken."""


def promise(kept: bool, sentence: str) -> None:
    """Raise Broken, with `sentence`, unless the promise was kept."""
    if not kept:
        raise Broken(sentence)


class Served:
    """`ridgeline serve` as a process, on a port that was free. When the context is left, the process is killed with
    everything that it started."""

    def __init__(self, *arguments: str, log: int | None = None) -> None:
        """Start the server.

        log: the descriptor that its standard error goes to. Without it, standard error is shown only if the server does
            not start.
        """
        command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--no-access-log"]
        command += ["--generation-config", "none", *arguments]  # as `LLM` with explicit parameters
        self._log = tempfile.TemporaryFile("w+") if log is None else None  # noqa: SIM115  # closed with the server
        stderr = self._log.fileno() if self._log is not None else log
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.url = self.said.split(" at ")[-1].split(" ")[0].strip()

    def __enter__(self) -> Served:
        if not self.said.startswith("Ready: "):
            code = self.process.wait()
            promise(False, f"the server did not start; exit code {code}: {self._last_words()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self._log is not None:
            self._log.close()

    def _last_words(self) -> str:
        if self._log is None:
            return self.said
        self._log.seek(0)
        return self.said + self._log.read()[-2000:].strip()

    @property
    def engine(self) -> int:
        return self._children("engine_process")[0]

    @property
    def engines(self) -> list[int]:
        return self._children("engine_process")

    @property
    def api_servers(self) -> list[int]:
        return self._children("api_server_process")

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET request; the status is 0 if there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def metric(self, name: str) -> float:
        """Return the sum over a metric's samples."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def busy(self) -> float:
        """Return the number of requests that any part of the server still knows, plus the share of cache
        blocks in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return sum(self.metric(name) for name in (*names, "ridgeline:face_open_requests", "ridgeline:face_open_tokens"))

    async def until_ready(self, times: int = 12) -> None:
        """Return once so many new connections in a row find an API server that has an engine: there may be several,
        and each notices by itself that an engine came back."""
        began, ready = time.monotonic(), 0
        while ready < times:
            status, _ = await asyncio.to_thread(self.get, "/health/ready")
            ready = ready + 1 if status == 200 else 0
            promise(time.monotonic() - began < PATIENCE, "not every API server is ready")

    def wait_idle(self, seconds: float = PATIENCE) -> bool:
        deadline = time.monotonic() + seconds
        while self.busy():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def wait_healthy(self, seconds: float = PATIENCE) -> float:
        """Wait until the server says that it can take requests, and return the seconds that this took."""
        began = time.monotonic()
        while self.get("/health/ready")[0] != 200:
            promise(time.monotonic() - began < seconds, f"the server was not back after {seconds:g} s")
            time.sleep(0.02)
        return time.monotonic() - began

    def _children(self, module: str) -> list[int]:
        return [pid for pid in children(self.process.pid) if module in _read(f"/proc/{pid}/cmdline")]


def children(pid: int) -> list[int]:
    return [int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split()]


def resident(pid: int) -> int:
    """Return the bytes of a process's resident memory."""
    return int(_read(f"/proc/{pid}/statm").split()[1]) * resource.getpagesize()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def allow_descriptors() -> None:
    """Raise the bound on open files to this user's limit: a thousand connections need more than the usual bound."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
