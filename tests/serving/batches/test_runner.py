"""The runner of batches against answers that are made up: engines that die, servers that are busy, disks that are full,
and runners that are cut off anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.apis.openai.batches import router as batch_routes
from ridgeline.serving.batches import runner as module
from ridgeline.serving.batches.lines import Written, raw_lines
from ridgeline.serving.batches.runner import Runner
from ridgeline.serving.stored.records import Batch, StoredFile, new_id
from ridgeline.serving.stored.store import NoSuchEntry, Store, StoreFull

URL = "/v1/completions"
Answer = Callable[[str], Awaitable[tuple[int, bytes]]]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(module, "PAUSE", 0.01)


class Machine:
    """An engine that can die, and the requests that came to it. A death ends all that is under way with 503."""

    def __init__(self, deadly: str = "") -> None:
        self.died, self.deadly = 0, deadly
        self.runs = Counter[str]()
        self.open = self.most = 0

    async def until_up(self) -> None:
        await asyncio.sleep(0)

    def deaths(self) -> int:
        return self.died

    async def __call__(self, path: str, body: bytes, name: str, owner: str) -> tuple[int, bytes]:
        prompt = json.loads(body)["prompt"]
        self.runs[prompt] += 1
        self.open += 1
        self.most = max(self.most, self.open)
        before = self.died
        try:
            await asyncio.sleep(0.005)
            self.died += prompt == self.deadly
        finally:
            self.open -= 1
        if self.died > before:
            return 503, b'{"error":{}}'
        return 200, b'{"usage":{"prompt_tokens":2,"completion_tokens":3}}'


def runner_of(store: Store, machine: Any, at_once: int = 4) -> Runner:
    return Runner(store, machine, machine, at_once=at_once, longest=4096, known=lambda model: True)


def add(store: Store, prompts: list[str], owner: str = "", **more: Any) -> Batch:
    """A batch with a line for each prompt, which is its custom id, too."""
    content = b"".join(
        json.dumps({"custom_id": p, "method": "POST", "url": URL, "body": {"prompt": p}}).encode() + b"\n"
        for p in prompts
    )
    path = store.begin(len(content))
    path.write_bytes(content)
    now = int(time.time())
    record = StoredFile(
        id=new_id("file-"), bytes=len(content), created_at=now, filename="in", purpose="batch", owner=owner
    )
    store.add(path, record)
    batch = Batch(
        id=new_id("batch_"),
        endpoint=URL,
        input_file_id=record.id,
        completion_window="24h",
        created_at=now,
        owner=owner,
        **more,
    )
    return store.create(batch, store.content(record.id))


async def until(runner: Runner, done: Callable[[], bool]) -> None:
    """Run until that is true, and cut the runner off."""
    task = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(60):
            while not done():
                assert not task.done(), task.result()
                await asyncio.sleep(0.005)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ended(store: Store, *batches: Batch) -> Callable[[], bool]:
    return lambda: all(store.batch(each.id, None).final for each in batches)


def outcomes(store: Store, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    found = [json.loads(line) for line in store.content(file).read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_a_line_that_kills_the_engine_is_found_and_all_others_are_answered(tmp_path: Path) -> None:
    store, machine = Store(tmp_path, 1 << 20), Machine(deadly="p7")
    batch = add(store, [f"p{n}" for n in range(30)])
    asyncio.run(until(runner_of(store, machine), ended(store, batch)))
    found = store.batch(batch.id, None)
    assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 29, 1)
    [guilty] = outcomes(store, found.error_file_id).values()
    assert (guilty["custom_id"], guilty["response"]["status_code"]) == ("p7", 503)
    assert machine.runs["p7"] == machine.died == 3
    assert machine.most <= 4
    assert (found.usage.input, found.usage.output) == (58, 87)


def test_what_the_server_cannot_take_now_is_run_again(tmp_path: Path) -> None:
    store, machine, refused = Store(tmp_path, 1 << 20), Machine(), Counter[str]()

    async def busy(path: str, body: bytes, name: str, owner: str) -> tuple[int, bytes]:
        refused[body.decode()] += 1
        return (429, b"{}") if refused[body.decode()] < 5 else await machine(path, body, name, owner)

    batch = add(store, ["a", "b", "c"])
    runner = Runner(store, busy, machine, at_once=2, longest=4096, known=lambda model: True)
    asyncio.run(until(runner, ended(store, batch)))
    assert outcomes(store, store.batch(batch.id, None).output_file_id).keys() == {"a", "b", "c"}
    assert set(refused.values()) == {5}


def test_runners_that_are_cut_off_anywhere_answer_each_line_once(tmp_path: Path) -> None:
    store, machine = Store(tmp_path, 1 << 20), Machine()
    batches = [add(store, [f"{name}{n}" for n in range(25)], owner=name) for name in ("x", "y", "z")]
    lines = {each.id: store.batches / each.id / "output.jsonl" for each in batches}

    for more in (1, 3, 10, 10, 20):
        enough = machine.runs.total() + more
        asyncio.run(until(runner_of(store, machine), lambda enough=enough: machine.runs.total() >= enough))  # type: ignore[misc]
        for path in lines.values():
            if path.exists():
                with path.open("ab") as file:
                    file.write(b'{"custom_id":"x1","resp')
    asyncio.run(until(runner_of(store, machine), ended(store, *batches)))
    asyncio.run(until(runner_of(store, machine), lambda: not any(path.exists() for path in lines.values())))
    for batch in batches:
        found = store.batch(batch.id, batch.owner)
        assert found.request_counts.completed == 25
        assert len(outcomes(store, found.output_file_id)) == 25
        assert store.file(found.output_file_id or "", batch.owner).bytes == found_size(store, found)
    again = machine.runs.total() - 75
    assert again <= 5 * 4, "only what was under way is run anew"


def found_size(store: Store, batch: Batch) -> int:
    return store.content(batch.output_file_id or "").stat().st_size


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, machine, write, failures = Store(tmp_path, 1 << 20), Machine(), os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        failures[0] += 1
        if failures[0] % 3 == 0:
            write(descriptor, data[:10])  # a part of the line
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("ridgeline.serving.batches.lines.os.write", full)
    batch = add(store, [f"p{n}" for n in range(12)])
    asyncio.run(until(runner_of(store, machine, 2), ended(store, batch)))
    found = store.batch(batch.id, None)
    assert (found.status, len(outcomes(store, found.output_file_id))) == ("completed", 12)


def test_what_a_slow_disk_took_first_replaces_nothing_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is written down by a thread, which goes on while the batch comes to its end."""
    store, machine, settle, slow = Store(tmp_path, 1 << 20), Machine(), os.fsync, list[bytes]()

    def settle_slowly(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(".batch.json-") and b'"in_progress"' in (said := path.read_bytes()):
            progress = msgspec.json.decode(said, type=Batch).request_counts
            if progress.completed and not slow:
                slow.append(said)
                time.sleep(1)  # the remaining lines take a twentieth of it
        settle(descriptor)

    monkeypatch.setattr("ridgeline.serving.stored.store.os.fsync", settle_slowly)
    batch = add(store, [f"p{n}" for n in range(12)])
    asyncio.run(until(runner_of(store, machine, 2), ended(store, batch)))  # once it has ended, no thread is left
    assert slow
    assert (found := store.batch(batch.id, None)).status == "completed"
    assert (found.request_counts.completed, len(outcomes(store, found.output_file_id))) == (12, 12)


def test_clients_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", 2)
    store, machine = Store(tmp_path, 1 << 20), Machine()
    many = [add(store, [f"{n}-{k}" for k in range(5)], owner="many") for n in range(4)]
    one = add(store, ["one"], owner="one")
    asyncio.run(until(runner_of(store, machine), ended(store, one)))
    assert sum(store.batch(each.id, None).final for each in many) < 4
    assert store.batch(one.id, "one").status == "completed"


def test_a_client_with_many_batches_keeps_nobody_else_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", 2)
    store, machine = Store(tmp_path, 1 << 20), Machine()

    async def for_ever(path: str, body: bytes, name: str, owner: str) -> tuple[int, bytes]:
        return (503, b"{}") if owner == "many" else await machine(path, body, name, owner)

    many = [add(store, [f"{n}"], owner="many") for n in range(3)]
    runner = Runner(store, for_ever, machine, at_once=4, longest=4096, known=lambda model: True)

    async def main() -> None:
        running = asyncio.create_task(until(runner, lambda: False))
        while not all(store.batch(each.id, None).in_progress_at for each in many[:2]):
            await asyncio.sleep(0.01)
        few = [add(store, ["x"], owner=owner) for owner in ("one", "other")]
        async with asyncio.timeout(30):
            while not ended(store, *few)():
                await asyncio.sleep(0.01)
        running.cancel()
        assert store.batch(many[2].id, None).in_progress_at is None, "a bound is a bound"

    asyncio.run(main())


def test_batches_that_are_cancelled_or_late_before_they_run_end_at_once(tmp_path: Path) -> None:
    store, machine = Store(tmp_path, 1 << 20), Machine()
    cancelled, late = add(store, ["a"]), add(store, ["b", "c"], expires_at=1)
    store.cancel(cancelled.id)
    assert store.batch(cancelled.id, "").status == "cancelling"
    asyncio.run(until(runner_of(store, machine), ended(store, cancelled, late)))
    assert store.batch(cancelled.id, "").status == "cancelled"
    found = store.batch(late.id, "")
    assert found.status == "expired"
    assert {e["error"]["code"] for e in outcomes(store, found.error_file_id).values()} == {"batch_expired"}
    assert machine.runs["a"] == 0


def test_a_folder_has_one_runner(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    lock = store.lock()
    assert lock is not None
    assert Store(tmp_path, 1 << 20).lock() is None
    os.close(lock)
    lock = store.lock()
    assert lock is not None
    os.close(lock)
    with pytest.raises(InvalidConfig, match="folder of batches"):
        Store(Path("/proc/none"), 1)


def test_files_are_bounded_and_leave_in_time(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    path = store.begin(900)
    with pytest.raises(StoreFull, match="900 bytes, of at most 1000"):
        store.begin(101)  # what is under way counts
    store.drop(path)
    path = store.begin(10)
    record = StoredFile(id=new_id("file-"), bytes=10, created_at=1, filename="x", purpose="batch", expires_at=2)
    store.add(path, record)
    with pytest.raises(NoSuchEntry):
        store.file(record.id, "")
    left = store.begin(5)
    os.utime(left, (1, 1))
    os.utime(left.parent, (1, 1))
    store.sweep()
    assert not store.content(record.id).exists()
    assert not left.exists()
    assert store.used() == (0, 0)


def test_an_upload_without_a_length_takes_room_as_its_bytes_come(tmp_path: Path) -> None:
    """Slow uploads that may become as long as any would else leave no room to others."""
    most, limit = 64 << 20, 20 << 20
    store = Store(tmp_path, limit)
    config = SimpleNamespace(batch_file_bytes=most)
    app = FastAPI()
    app.include_router(batch_routes(cast("Any", SimpleNamespace(config=config, files=store))))
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    used: list[int] = []

    async def upload(content: bytes) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield head
            for start in range(0, len(content), 1 << 20):
                yield content[start : start + (1 << 20)]
                used.append(store.used()[0])
            yield b"\r\n--b--\r\n"

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            return await client.post("/v1/files", content=pieces(), headers=headers)

    answer = asyncio.run(upload(b"x" * (6 << 20)))
    assert (answer.status_code, answer.json()["bytes"]) == (200, 6 << 20)
    assert used[0] <= 4 << 20, "not the longest file's room"
    assert store.used()[0] == 6 << 20
    with pytest.raises(StoreFull, match="of at most"):
        asyncio.run(upload(b"x" * (15 << 20)))
    assert store.used() == (6 << 20, 1), "what did not fit is gone"


def test_what_batches_need_of_deleted_files_counts(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    batch = add(store, ["x" * 1000])
    used, _ = store.used()
    assert used > 1000
    store.create(msgspec.structs.replace(batch, id=new_id("batch_")), store.content(batch.input_file_id))
    assert store.used()[0] == used, "it is on the disk once"
    store.delete_file(batch.input_file_id, "")
    assert store.used()[0] == used
    for _ in range(3):
        more = add(store, ["x" * 1000])
        store.delete_file(more.input_file_id, "")
    with pytest.raises(StoreFull):
        add(store, ["x" * 1000])


def test_lines_are_never_longer_in_memory_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"x" * 5000 + b"\n\n \nb\n" + b"y" * 101 + b"\n" + b"z" * 100)
    found = list(raw_lines(path, 100))
    assert found == [(0, b"a\n"), (1, None), (4, b"b\n"), (5, None), (6, b"z" * 100)]


def test_an_answer_that_was_torn_is_taken_away(tmp_path: Path) -> None:
    path, done = tmp_path / "file", set[bytes]()
    path.write_bytes(b'{"custom_id":"a"}\n{"custom_id":"b"}\n{"custom')
    written = Written(path, done)
    written.close()
    assert (written.count, len(done)) == (2, 2)
    assert path.read_bytes() == b'{"custom_id":"a"}\n{"custom_id":"b"}\n'


def test_lines_that_are_cut_before_they_begin_leave_their_places_to_others(tmp_path: Path) -> None:
    """The time of these batches is over when they begin."""
    store, machine = Store(tmp_path, 1 << 20), Machine()
    late = [add(store, [f"{b}-{n}" for n in range(6)], expires_at=1) for b in range(20)]
    timely = add(store, ["p"])
    asyncio.run(until(runner_of(store, machine, at_once=2), ended(store, *late, timely)))
    for batch in late:
        read = store.batch(batch.id, None)
        assert read.status == "expired"
        counts = read.request_counts
        assert counts.completed + counts.failed == 6
    assert store.batch(timely.id, None).status == "completed"
