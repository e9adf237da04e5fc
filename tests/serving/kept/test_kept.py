"""The room for answers: what is dropped first, who sees what, and API servers that ask each other."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from ridgeline.serving.errors import BadRequest, Overloaded
from ridgeline.serving.kept.kept import Kept
from ridgeline.serving.kept.store import Log, Record, Store


def record(name: str, owner: str = "a", size: int = 10, **more: object) -> Record:
    return Record(name, owner, owner, b"x" * size, **more)  # type: ignore[arg-type]


def running(name: str, log: Log | None = None, owner: str = "a") -> Record:
    """A record that something still writes. It needs a loop that runs."""
    return record(name, owner, background=True, task=asyncio.create_task(asyncio.sleep(3600)), log=log)


def test_the_oldest_of_whoever_has_most_makes_room() -> None:
    store = Store(most=3, most_bytes=1000)
    for name, owner in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a")):
        store.add(record(name, owner))
    assert [bool(store.find(name, name[0])) for name in ("a1", "b1", "a2", "a3")] == [False, True, True, True]
    store.add(record("b2", "b", size=970))
    assert [bool(store.find(name, name[0])) for name in ("b1", "a2", "a3", "b2")] == [False, True, True, True]
    store.add(record("b3", "b", size=1001))
    assert store.find("b3", "b") is None, "alone it is too large"


def test_sizes_are_those_of_what_is_there() -> None:
    """Whatever comes, grows and goes, by chance."""
    chance = random.Random(0)
    store, names = Store(most=20, most_bytes=600), [f"r{index}" for index in range(40)]
    known: dict[str, Record] = {}
    for _ in range(2000):
        name = chance.choice(names)
        found = known.get(name)
        if found is None or store.find(name, found.owner) is None:
            known[name] = found = record(name, chance.choice("abc"), chance.randrange(80))
            store.add(found)
        elif chance.random() < 0.5:
            found.body += b"y" * chance.randrange(20)
            store.update(found)
        else:
            store.remove(found)
        there = [each for each in known.values() if store.find(each.id, each.owner) is each]
        assert store.size == sum(len(each.body) for each in there) <= 600
        assert len(store) == len(there) <= 20


def test_what_runs_stays_and_is_bounded_by_number_and_by_events() -> None:
    async def test() -> None:
        store, log = Store(most=2, most_bytes=100), Log()
        first, second = running("first", log), running("second")
        store.add(first)
        store.add(second)
        with pytest.raises(Overloaded):
            store.add(running("third"))
        while not log.forgotten:
            log.events.append(b"z" * 10)
            store.update(first, 10)
        assert log.events == []
        assert store.find("first", "a") is first
        assert store.size <= 100
        for each in (first, second):
            assert each.task is not None
            each.task.cancel()
            each.task, log.ended = None, True
            store.update(each)
        store.add(record("new", size=50))
        assert store.find("first", "a") is None
        assert store.find("new", "a") is not None

    asyncio.run(test())


def test_api_servers_ask_the_one_that_keeps_an_answer(tmp_path: Path) -> None:
    async def test() -> None:
        one, two = (Kept(place, 2, tmp_path, most=8) for place in (1, 2))
        async with one.listening(), two.listening():
            name, log = two.new_name(), Log()
            assert name.endswith("2")
            kept = Record(name, "a", "a", b"{}", (b"[1]", b"[2]"))
            two.store.add(kept)
            for each in (one, two):
                found = await each.find(name, "a")
                assert found is not None
                assert (found.body, found.turns, found.runs) == (b"{}", (b"[1]", b"[2]"), False)
                assert await each.find(name, "b") is None
                assert await each.delete(name, "b") is None
            with pytest.raises(BadRequest, match="not made in the background"):
                await one.cancel(name, "a")
            written = running(two.new_name(), log)
            two.store.add(written)
            reading = asyncio.create_task(one.events(written.id, "a", 0))
            await asyncio.sleep(0.05)
            log.events.append(b"event")
            log.changed()
            events = await reading
            assert events is not None
            assert (events.events, events.ended) == ([b"event"], False)
            task = written.task
            assert task is not None
            assert await one.cancel(written.id, "a") is not None
            assert task.cancelled()
            assert await one.delete(name, "a") is not None
            assert two.store.find(name, "a") is None
            for wrong in ("resp_x", name[:-1] + "7", "../" + name, name + "0" * 9):
                assert await one.find(wrong, "a") is None
        assert await one.find(name, "a") is None, "the other one is gone"

    asyncio.run(test())
