"""Work on texts is shared fairly by the owners of requests: one owner's long work does not make another owner wait, and
a request that waits too long gets an answer."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from ridgeline.serving import owner
from ridgeline.serving.shares import Busy, Shares


def of(name: str, shares: Shares, work: object) -> asyncio.Task[object]:
    async def run() -> object:
        owner.set_to(name)
        return await shares.run(work)  # type: ignore[arg-type]

    return asyncio.create_task(run())


@asynccontextmanager
async def flood(shares: Shares, count: int = 8) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Work of one owner that lasts until this ends."""
    begun, free = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return free.wait(60)

    tasks = [of("many", shares, work) for _ in range(count)]
    assert await asyncio.to_thread(begun.wait, 60)
    try:
        yield tasks
    finally:
        free.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_an_owner_that_floods_leaves_others_their_share() -> None:
    async def main() -> None:
        shares = Shares(3, "test")
        async with flood(shares) as tasks:
            for number in range(4):
                assert await asyncio.wait_for(of("other", shares, lambda n=number: n + 1), 20) == number + 1
            assert not any(task.done() for task in tasks)
        assert [task.result() for task in tasks] == [True] * 8

    asyncio.run(main())


def test_the_owner_is_known_within_the_work() -> None:
    async def main() -> None:
        assert await of("a", Shares(2, "test"), owner.current) == "a"

    asyncio.run(main())


def test_what_waits_too_long_is_refused_and_never_begins() -> None:
    async def main() -> None:
        shares, begun = Shares(2, "test", patience=0.5), list[int]()
        async with flood(shares, 1):
            with pytest.raises(Busy, match=r"no time to read the request within 0\.5 s; try again later") as caught:
                await of("many", shares, lambda: begun.append(1))
            assert (caught.value.status, caught.value.retry_after) == (503, 2)
        assert await of("many", shares, lambda: "next") == "next"
        assert not begun

    asyncio.run(main())


def test_what_takes_too_long_is_refused_and_counts_until_it_ends() -> None:
    async def main() -> None:
        shares = Shares(2, "test", patience=1.0, seconds=0.5)
        async with flood(shares, 1) as [task]:
            with pytest.raises(Busy, match=r"took longer than 0\.5 s"):
                await task
            with pytest.raises(Busy, match="no time"):
                await of("many", shares, lambda: 1)
            assert await of("other", shares, lambda: 2) == 2

    asyncio.run(main())


def test_work_of_a_client_that_left_never_begins() -> None:
    async def main() -> None:
        shares, begun = Shares(2, "test"), list[int]()
        async with flood(shares, 1):
            task = of("many", shares, lambda: begun.append(1))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await of("many", shares, lambda: "next") == "next"
        assert not begun

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await of("a", Shares(2, "test"), lambda: 1 / 0)

    asyncio.run(main())


def test_work_that_fails_keeps_nothing_that_it_read() -> None:
    """Without the garbage collector: an error, its frames and the future of the work must not hold each other."""

    class Body:
        pass

    async def main() -> weakref.ref[Body]:
        body = Body()

        def work() -> None:
            raise ValueError(str(body))

        with suppress(ValueError):
            await Shares(2, "test").run(work)
            raise AssertionError
        return weakref.ref(body)

    gc.disable()
    try:
        left = asyncio.run(main())
        # The thread lets go of the work just after it has said how the work ended.
        end = time.monotonic() + 10
        while left() is not None and time.monotonic() < end:
            time.sleep(0.001)
        assert left() is None
    finally:
        gc.enable()
