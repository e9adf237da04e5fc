"""Disks that are full and descriptors that are used up: told as what they are, and gone on with when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ridgeline.serving.apis.app import _answer
from ridgeline.serving.apis.openai.batches import router as batch_routes
from ridgeline.serving.batches import runner as module
from ridgeline.serving.errors import NoRoom, lack_of
from ridgeline.serving.http.errors import failure_of, response_for
from ridgeline.serving.stored.store import Store
from tests.serving.batches.test_runner import Machine, add, ended, outcomes, runner_of, until

Full = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(module, "PAUSE", 0.01)


@contextmanager
def lowered(which: int, to: int) -> Iterator[None]:
    """Lower a limit of this process."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (to, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@contextmanager
def ballast(disk: Path) -> Iterator[None]:
    """Fill a small disk."""
    with open(disk / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    try:
        yield
    finally:
        (disk / "ballast").unlink()


@pytest.fixture(params=["small disk", "short files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Full]]:
    """A folder, and what leaves no room in it: a disk of one megabyte, or a limit on files, which needs no rights."""
    if request.param == "short files":
        yield tmp_path, lambda: lowered(resource.RLIMIT_FSIZE, 1500)
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield tmp_path, lambda: ballast(tmp_path)
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def uploaded(folder: Path, content: bytes) -> httpx.Response:
    """What the API answers to a file."""
    app = FastAPI()
    config = SimpleNamespace(batch_file_bytes=1 << 20)
    app.include_router(batch_routes(SimpleNamespace(config=config, files=Store(folder, 1 << 30))))  # type: ignore[arg-type]
    for kind in (NoRoom, OSError):
        app.add_exception_handler(kind, _answer)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
            return await client.post("/v1/files", **form)

    return asyncio.run(send())


def test_a_file_without_room_is_507_and_leaves_nothing(disk: tuple[Path, Full]) -> None:
    folder, full = disk
    content = b"x" * 100_000
    store = Store(folder, 1 << 30)
    with full():
        answer = uploaded(folder, content)
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "storage_full"
    assert "no room" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert (list(store.files.iterdir()), list((folder / "partial").iterdir())) == ([], [])
    assert uploaded(folder, content).status_code == 200


def test_a_batch_without_room_tells_its_owner_and_goes_on(disk: tuple[Path, Full]) -> None:
    """No line runs in vain while it waits, but for those that were under way."""
    folder, full = disk
    store, machine = Store(folder, 1 << 30), Machine()
    batch = add(store, [f"p{number}" for number in range(40)])

    async def main() -> None:
        running = asyncio.create_task(until(runner_of(store, machine, 2), ended(store, batch)))
        try:
            while not store.batch(batch.id, None).request_counts.completed:
                await asyncio.sleep(0.005)
            with full():
                while not store.batch(batch.id, None).errors:
                    await asyncio.sleep(0.005)
                before = machine.runs.total()
                await asyncio.sleep(0.5)  # ten times as long as it waits between tries
                found = store.batch(batch.id, None)
                assert (found.status, [each.code for each in found.errors]) == ("in_progress", ["storage_full"])
                assert "no room" in found.errors[0].message
                assert machine.runs.total() == before
        finally:
            await running

    asyncio.run(main())
    found = store.batch(batch.id, None)
    assert (found.status, found.errors) == ("completed", [])
    assert len(outcomes(store, found.output_file_id)) == 40
    assert machine.runs.total() <= 40 + 2 * 2, "lines under way when it became full, and one try more"


def test_without_descriptors_a_file_is_507_and_the_next_one_is_taken(tmp_path: Path) -> None:
    Store(tmp_path, 1 << 30)
    uploaded(tmp_path, b"first")  # what is imported and opened for good
    store = Store(tmp_path, 1 << 30)
    os.close(free := os.open("/dev/null", os.O_RDONLY))
    with lowered(resource.RLIMIT_NOFILE, free), pytest.raises(OSError, match="Too many") as failure:
        store.begin(5)
    answer = response_for(failure.value, {"type": "http", "path": "/v1/files"})
    assert answer.status_code == 507
    assert list((tmp_path / "partial").iterdir()) == []
    assert uploaded(tmp_path, b"second").status_code == 200


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE])
def test_whatever_the_system_lacks_is_told_alike(number: int) -> None:
    failure = failure_of(OSError(number, os.strerror(number)))
    assert (failure.status, failure.code, failure.retry_after) == (507, "storage_full", 30)
    assert str(failure).startswith("the server has no room for this now: ")


def test_other_errors_of_the_system_are_the_servers_own() -> None:
    assert lack_of(OSError(errno.EACCES, "no")) is None
    assert failure_of(OSError(errno.EACCES, "no")).status == 500
