"""Workers and routers for tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.serving.routing.running import FakeWorker, RunningRouter, routing


@pytest.fixture
def new_worker() -> Iterator[Callable[..., FakeWorker]]:
    """Workers of one test, which may die."""
    made: list[FakeWorker] = []

    def make(models: str = "m") -> FakeWorker:
        made.append(FakeWorker(models))
        return made[-1]

    yield make
    for each in made:
        each.send(signal.SIGCONT) if each.process.poll() is None else None
        each.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FakeWorker, FakeWorker]]:
    """Two workers that live as long as the module, one of which has a model more."""
    workers = FakeWorker("m"), FakeWorker("m,other")
    yield workers
    for each in workers:
        each.close()


@pytest.fixture(scope="module")
def router(pair: tuple[FakeWorker, FakeWorker]) -> Iterator[RunningRouter]:
    with routing(*pair, max_body_bytes=1 << 20, max_buffered_bytes=64 << 20) as running:
        yield running
