"""The list of adapters that an engine serves: its bounds, requests that still use one, and engines that come after.

A worker that reads nothing takes the place of the real one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.core.settings.adapters import NamedAdapter
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.generation.replicas import Replicas
from ridgeline.serving.processes.adapters import EngineAdapters
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.transport.messages import AdapterAnswer, EngineFacts, LoadAdapter, ServedAdapter, UnloadAdapter
from tests.serving.generation.test_engine_client import FACTS


class Worker:
    """A worker whose adapters have 100 bytes each. broken: folders that cannot be read."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.broken = set[str]()
        self.going = Event()
        self.going.set()

    def add_adapter(self, number: int, folder: Path) -> AdapterFacts:
        assert self.going.wait(60)
        if str(folder) in self.broken:
            raise ModelLoadError(f"{folder} is damaged.")
        self.held[number] = str(folder)
        return AdapterFacts(f"key of {folder}", 4, 100)

    def remove_adapter(self, number: int) -> None:
        del self.held[number]


class Scheduler:
    """under_way: adapters that plans under way name."""

    def __init__(self) -> None:
        self.under_way = set[int]()

    def forget_adapter(self, number: int) -> bool:
        return number not in self.under_way


def settings(folder: Path, **options: Any) -> EngineSettings:
    bounds = {"most_adapters": 3, "most_adapter_bytes": 1000, **options}
    return EngineSettings(socket=str(folder / "socket"), options={"enable_lora": True}, served_name="base", **bounds)


def order(name: str, number: int, **more: Any) -> LoadAdapter:
    return LoadAdapter(id=number, name=name, number=number, folder=f"/{name}{number}", **more)


def load(adapters: EngineAdapters, worker: Worker, *orders: LoadAdapter) -> list[str]:
    """Load adapters one after the other, and return what went wrong with each."""
    said = []
    for each in orders:
        error = adapters.begin(b"", each, worker)
        while not error and adapters.pending:
            error = "".join(answer.error for _, answer in adapters.done(worker))
        said.append(error)
    return said


def request(name: str, adapter: int) -> Any:
    return SimpleNamespace(id=name, adapter=adapter)


def test_counts_and_bytes_are_bounded_and_what_fails_leaves_nothing(tmp_path: Path) -> None:
    worker = Worker()
    adapters = EngineAdapters(settings(tmp_path, most_adapter_bytes=250))
    adapters.load_all(worker, "base")
    worker.broken = {"/b8"}
    said = load(adapters, worker, order("a", 7), order("b", 8), order("b", 9), order("a", 10), order("c", 11))
    for word, error in zip(("", "damaged", "", "already", "exceed"), said, strict=True):
        assert word in error
    assert (said[0], said[2]) == ("", "")
    assert worker.held == {7: "/a7", 9: "/b9"}
    adapters = EngineAdapters(settings(tmp_path))
    adapters.load_all(worker := Worker(), "base")
    said = load(adapters, worker, *(order(name, number) for number, name in enumerate("abcd", 20)))
    assert said[:3] == ["", "", ""]
    assert "max_served_loras" in said[3]
    assert load(adapters, worker, order("a", 30, replaces=True)) == [""]
    assert [(each.name, each.number) for each in adapters.listed] == [("b", 21), ("c", 22), ("a", 30)]


def test_two_orders_at_once_keep_the_bounds(tmp_path: Path) -> None:
    worker, adapters = Worker(), EngineAdapters(settings(tmp_path, most_adapters=1))
    adapters.load_all(worker, "base")
    worker.going.clear()
    assert [adapters.begin(b"", order(name, number), worker) for name, number in (("a", 7), ("b", 8))] == ["", ""]
    assert not list(adapters.done(worker))  # both are being read
    worker.going.set()
    answers: list[str] = []
    while adapters.pending:
        answers += [answer.error for _, answer in adapters.done(worker)]
    assert answers[0] == ""
    assert "max_served_loras" in answers[1]
    assert worker.held == {7: "/a7"}


def test_an_unloaded_adapter_stays_until_its_requests_and_plans_have_ended(tmp_path: Path) -> None:
    worker, scheduler, adapters = Worker(), Scheduler(), EngineAdapters(settings(tmp_path))
    adapters.load_all(worker, "base")
    load(adapters, worker, order("a", 7))
    adapters.check(request("r", 7))
    adapters.enter(request("r", 7))
    assert adapters.figures()["adapter waiting: a"] == 1
    adapters.note_begin("r")
    assert adapters.figures()["adapter running: a"] == 1
    assert not adapters.unload(UnloadAdapter(id=1, name="a")).error
    with pytest.raises(InvalidRequest, match="unloaded"):
        adapters.check(request("s", 7))
    adapters.forget(scheduler, worker)  # type: ignore[arg-type]
    assert worker.held == {7: "/a7"}
    later = Worker()
    adapters.load_all(later, "base")  # the model is loaded again, and the request still waits
    assert later.held == {7: "/a7"}
    adapters.leave("r")
    scheduler.under_way = {7}
    adapters.forget(scheduler, later)  # type: ignore[arg-type]
    assert later.held == {7: "/a7"}
    scheduler.under_way = set()
    adapters.forget(scheduler, later)  # type: ignore[arg-type]
    assert not later.held
    assert adapters.unload(UnloadAdapter(id=1, name="a")).unknown


def test_an_engine_that_replaces_another_begins_with_its_list(tmp_path: Path) -> None:
    given = (NamedAdapter("given", "/given"), NamedAdapter("other", "/other"))
    worker, adapters = Worker(), EngineAdapters(settings(tmp_path, adapters=given, most_adapters=9))
    adapters.load_all(worker, "base")
    load(adapters, worker, order("a", 70), order("b", 80))
    adapters.unload(UnloadAdapter(id=1, name="other"))
    later = Worker()
    later.broken = {"/b80"}
    second = EngineAdapters(settings(tmp_path, adapters=given, life=2))
    second.load_all(later, "base")
    assert [(each.name, each.number) for each in second.listed] == [("given", 1), ("a", 70)]
    later.broken = {"/given"}
    with pytest.raises(ModelLoadError):  # the operator asked for this one
        EngineAdapters(settings(tmp_path, adapters=given, life=3)).load_all(later, "base")
    fresh = EngineAdapters(settings(tmp_path, adapters=given))  # a server that starts reads no list
    fresh.load_all(Worker(), "base")
    assert [each.name for each in fresh.listed] == ["given", "other"]


class Engine:
    """An engine's client, as `Replicas` uses it for adapters. fails: it loads none."""

    def __init__(self, *, fails: bool = False) -> None:
        self.name, self.fails = "face", fails
        self.facts: Any = SimpleNamespace()
        self.adapters: dict[str, int] = {}

    async def change_adapters(self, message: LoadAdapter | UnloadAdapter, timeout: float) -> AdapterAnswer:
        await asyncio.sleep(0)
        if isinstance(message, LoadAdapter):
            if self.fails or message.name in self.adapters:
                return AdapterAnswer(id=message.id, error="no")
            self.adapters[message.name] = message.number
        elif message.number in (0, self.adapters.get(message.name)) and message.name in self.adapters:
            del self.adapters[message.name]
        else:
            return AdapterAnswer(id=message.id, error="none", unknown=True)
        return AdapterAnswer(id=message.id)


def test_engines_have_an_adapter_all_or_none() -> None:
    async def run() -> None:
        engines = [Engine(), Engine()]
        replicas = Replicas(engines)  # type: ignore[arg-type]
        found = await asyncio.gather(*(replicas.change_adapters(order("a", number), 1) for number in (7, 8)))
        assert sorted(bool(each.error) for each in found) == [False, True]  # two at once: one of them wins
        assert engines[0].adapters == engines[1].adapters
        assert not (await replicas.change_adapters(UnloadAdapter(id=1, name="a"), 1)).error
        engines[1].fails = True
        assert (await replicas.change_adapters(order("a", 9), 1)).error
        assert engines[0].adapters == {}
        engines[1].facts = None
        with pytest.raises(Unavailable):
            await replicas.change_adapters(order("a", 9), 1)

    asyncio.run(run())


def test_the_list_holds_what_all_engines_have_alike() -> None:
    def engine(*adapters: tuple[str, int, str]) -> Any:
        listed = [ServedAdapter(name=n, number=number, key=key, folder="", parent="") for n, number, key in adapters]
        facts = EngineFacts(process_id=1, adapters=listed, **FACTS)  # type: ignore[arg-type]
        return SimpleNamespace(name="face", facts=facts, known=facts)

    replicas = Replicas([engine(("a", 1, "x"), ("b", 2, "y"), ("c", 3, "z")), engine(("a", 1, "x"), ("b", 2, "q"))])
    assert replicas.facts is not None
    assert [each.name for each in replicas.facts.adapters] == ["a"]
