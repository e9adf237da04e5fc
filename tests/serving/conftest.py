"""One real engine process on the embedded model for all tests of the server, and faces that talk to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from ridgeline.core.serving import ServeConfig
from ridgeline.serving.engine_client import EngineClient
from ridgeline.serving.face import Face

MODEL = "embedded"
_names = itertools.count(1)


def start_engine(socket: Path, **options: object) -> subprocess.Popen[bytes]:
    """An engine process; closing its standard input ends it."""
    process = subprocess.Popen([sys.executable, "-m", "ridgeline.serving.engine_process"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    settings = {"socket": str(socket), "options": options, "served_name": MODEL}
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process


def stop_engine(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@asynccontextmanager
async def open_face(socket: Path, config: ServeConfig | None = None) -> AsyncIterator[Face]:
    """A face whose engine answers."""
    probe = EngineClient(str(socket), f"probe-{next(_names)}", buffer=1)
    running = asyncio.create_task(probe.run())
    facts = await asyncio.wait_for(probe.wait_until_up(), 60)
    running.cancel()
    face = Face.build(
        config or ServeConfig(), Path(facts.folder), (MODEL,), str(socket), name=f"test-face-{next(_names)}"
    )
    running = asyncio.create_task(face.client.run())
    try:
        await asyncio.wait_for(face.client.wait_until_up(), 60)
        yield face
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(scope="session")
def engine_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of the socket of an engine that all tests share; who kills engines starts one of his own."""
    socket = tmp_path_factory.mktemp("engine") / "socket"
    process = start_engine(socket)
    yield socket
    stop_engine(process)


@pytest.fixture
def face_of(engine_socket: Path) -> Callable[..., AbstractAsyncContextManager[Face]]:
    """`async with face_of() as face`, or with a `ServeConfig`."""
    return lambda config=None: open_face(engine_socket, config)
