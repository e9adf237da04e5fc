"""The runner of batches: it works through their lines, a bounded number at a time, and goes on where it was when it is
started again.

A line is done if its outcome is in the files, so it is not run twice. A line that was running when the process died is
run again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec

from ridgeline.core.lacking import lacking
from ridgeline.serving.batches.lines import (
    ENDPOINTS,
    Asked,
    Invalid,
    Outcome,
    Response,
    Written,
    check,
    digest_of,
    raw_lines,
    read_line,
)
from ridgeline.serving.stored.records import Batch, Counts, Mistake, Status, StoredFile, Usage, new_id
from ridgeline.serving.stored.store import Store, waiting

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 16  # batches: the others wait, except for one of each client
LOOK = 0.25  # seconds between looks for new batches, cancellations and progress to be written down
SWEEP = 300.0  # seconds between removals of what has expired
PAUSE = 1.0  # seconds before a line is tried again that the server could not take
TRIES = 3  # deaths of the engine that one line may have been part of
AGAIN = (408, 429, 499, 503)  # statuses that say nothing about the request itself
READ_AHEAD = 16  # lines read from disk at a time

_Item = TypeVar("_Item")
Call = Callable[[str, bytes, str, str], Awaitable[tuple[int, bytes]]]  # path, body, request id, owner


class Engine(Protocol):
    """The engine as the runner sees it: if it is there, and how often it has died."""

    async def until_up(self) -> None: ...

    def deaths(self) -> int: ...


class Runner:
    """Runs the batches of a store by `call`. `known` says if there is a model of that name, and `longest` is the most
    bytes that a line may have. `endpoints` are those that exist."""

    def __init__(
        self,
        store: Store,
        call: Call,
        engine: Engine,
        *,
        at_once: int,
        longest: int,
        known: Callable[[Any], bool],
        endpoints: Collection[str] = ENDPOINTS,
    ) -> None:
        self.store, self.call, self.engine = store, call, engine
        self.longest, self.known, self.endpoints = longest, known, endpoints
        self.places = asyncio.Semaphore(at_once)
        self.suspects = asyncio.Lock()  # lines that the engine died with run one at a time
        self._running: dict[str, asyncio.Task[None]] = {}
        self._owners: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._waiting: dict[str, Batch] = {}

    async def run(self) -> None:
        """Run batches until cancelled. Lines under way then are run by the next runner."""
        swept = 0.0
        try:
            while True:
                try:
                    if time.monotonic() - swept > SWEEP:
                        swept = time.monotonic()
                        await asyncio.to_thread(self.store.sweep)
                    await self._start_some()
                except OSError as error:
                    if lacking(error) is None:
                        raise
                    logger.error("batches wait: %s", error)
                    await asyncio.sleep(5 * PAUSE)
                await asyncio.sleep(LOOK)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _start_some(self) -> None:
        for batch in await asyncio.to_thread(self._due):
            self._owners[batch.owner] += 1
            task = self._running[batch.id] = asyncio.create_task(Work(self, batch).run())
            task.add_done_callback(lambda done, batch=batch: self._forget(done, batch))  # type: ignore[misc]

    def _due(self) -> list[Batch]:
        """Return batches to begin with, of clients with few of them first, and then the oldest first. A client without
        any never waits for those of others to end."""
        waiting = self._waiting
        for name in self.store.names():
            if name in self._ended or name in self._running or name in waiting:
                continue
            batch = self.store.kept(name)
            if batch is not None and batch.final:
                self._ended.add(name)
                self.store.clear(batch)
            elif batch is not None:
                waiting[name] = batch
        chosen, owners = list[Batch](), Counter(self._owners)
        while waiting:
            first = min(waiting.values(), key=lambda batch: (owners[batch.owner], batch.id))
            if owners[first.owner] and len(self._running) + len(chosen) >= MOST_AT_ONCE:
                break
            owners[first.owner] += 1
            chosen.append(waiting.pop(first.id))
        return chosen

    def _forget(self, task: asyncio.Task[None], batch: Batch) -> None:
        del self._running[batch.id]
        self._owners[batch.owner] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the batch %s stopped", batch.id, exc_info=error)


class Work:
    """The work on one batch."""

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self._runner, self._store, self.batch = runner, runner.store, batch
        self._folder = runner.store.batches / batch.id
        self._done: set[bytes] = set()
        self._stop: Status | None = None  # why no more lines are run
        self._broken: OSError | None = None  # why an outcome could not be written
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving = Lock()

    async def run(self) -> None:
        """Bring the batch to its end, and wait a while where something of the machine fails, to be tried again."""
        try:
            await self._run_or_fail()
        except Exception as error:
            if lacking(error) is not None:
                logger.error("the batch %s waits: %s", self.batch.id, error)
                await self._wait_for_room(error)
                return
            logger.exception("the batch %s stopped and is tried again", self.batch.id)
            await asyncio.sleep(5 * PAUSE)

    async def _run_or_fail(self) -> None:
        try:
            await self._run()
        except FileNotFoundError as error:
            self.batch.errors = [Mistake("input_lost", f"The server has lost a file of this batch: {error}.")]
            await self._end("failed")

    async def _wait_for_room(self, error: BaseException) -> None:
        """Wait until the disk can be written again, and let the client know meanwhile. No line runs whose result would
        be lost."""
        what = lacking(error)
        while what is not None:
            await asyncio.to_thread(self._store.tell, self.batch, waiting(what))
            await asyncio.sleep(5 * PAUSE)
            what = None
            try:
                await asyncio.to_thread(self._store.check_disk)
            except OSError as still:
                what = lacking(still)
        await asyncio.to_thread(self._store.tell, self.batch, None)

    async def _run(self) -> None:
        batch = self.batch
        await asyncio.to_thread(self._store.tell, batch, None)  # a runner may have died while it waited
        if batch.in_progress_at is None and not await self._validate():
            return
        async with self._files() as (outputs, errors):
            if batch.finalizing_at is None:
                await self._answer(outputs, errors)
            await self._finalize(outputs, errors)

    # ---- the steps --------------------------------------------------------------------------------------------

    async def _validate(self) -> bool:
        batch, runner = self.batch, self._runner
        if self._store.cancelled(batch.id):
            return await self._end("cancelled")
        counts, batch.model, batch.errors = await asyncio.to_thread(
            check,
            self._folder / "input",
            batch.endpoint,
            runner.endpoints,
            runner.longest,
            runner.known,
            one_model=batch.endpoint is not None,
        )
        if batch.errors:
            return await self._end("failed")
        batch.request_counts = counts
        batch.in_progress_at, batch.status = _now(), "in_progress"
        await self._save()
        return True

    async def _end(self, status: Status) -> bool:
        self.batch.status = status
        setattr(self.batch, f"{status}_at", _now())
        await self._save()
        await asyncio.to_thread(self._store.clear, self.batch)
        logger.info("batch %s: %s", self.batch.id, status)
        return False

    @asynccontextmanager
    async def _files(self) -> AsyncIterator[tuple[Written, Written]]:
        """Open the files of outcomes, and learn from them what is done."""
        opened = []
        try:
            for name in ("output.jsonl", "errors.jsonl"):
                opened.append(await asyncio.to_thread(Written, self._folder / name, self._done))
            yield opened[0], opened[1]
        finally:
            for each in opened:
                each.close()

    async def _answer(self, outputs: Written, errors: Written) -> None:
        """Run all lines that have no outcome yet, until there are none or the batch must end."""
        watch = asyncio.create_task(self._watch(outputs, errors))
        try:
            async for asked in self._lines():
                await self._runner.places.acquire()
                if self._stop is not None or self._broken is not None:
                    self._runner.places.release()
                    break
                task = asyncio.create_task(self._place(asked, outputs, errors))
                self._tasks.add(task)
                task.add_done_callback(self._leave)
            while self._tasks and self._stop is None:
                await asyncio.wait(self._tasks, timeout=LOOK)
        finally:
            watch.cancel()
            left = [watch, *self._tasks]
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._broken is not None:
            raise self._broken
        if self._stop == "expired":
            await self._expire(errors)

    async def _expire(self, errors: Written) -> None:
        told = {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        }
        async for asked in self._lines():
            errors.add(Outcome(self._name(asked), asked.custom_id, None, told))
            self._done.add(digest_of(asked.custom_id))

    async def _finalize(self, outputs: Written, errors: Written) -> None:
        """Make files of the outcomes. Their names are written down first, so that it can be done again."""
        batch = self.batch
        if batch.finalizing_at is None:
            batch.ends_as = self._stop or "completed"
            batch.status, batch.finalizing_at = "finalizing", _now()
            batch.output_file_id = new_id("file-") if outputs.count else None
            batch.error_file_id = new_id("file-") if errors.count else None
            await asyncio.to_thread(outputs.settle)
            await asyncio.to_thread(errors.settle)
            self._tell(outputs, errors)
            await self._save()
        for name, kind, written in (
            (batch.output_file_id, "output", outputs),
            (batch.error_file_id, "error", errors),
        ):
            if name is not None:
                now = _now()
                record = StoredFile(
                    id=name,
                    bytes=written.path.stat().st_size,
                    created_at=now,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                    expires_at=None if batch.output_seconds is None else now + batch.output_seconds,
                    owner=batch.owner,
                )
                await asyncio.to_thread(self._store.publish, batch, written.path, record)
        await self._end(batch.ends_as or "completed")

    # ---- lines ------------------------------------------------------------------------------------------------

    async def _lines(self) -> AsyncIterator[Asked]:
        """Yield the requests without an outcome, read from disk as they are needed."""
        lines = raw_lines(self._folder / "input", self._runner.longest)
        while pieces := await asyncio.to_thread(lambda: list(islice(self._requests(lines), READ_AHEAD))):
            for asked in pieces:
                yield asked

    def _requests(self, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[Asked]:
        runner = self._runner
        for number, line in lines:
            try:
                asked = read_line(number, line, self.batch.endpoint, runner.endpoints, runner.longest)
            except Invalid as error:  # it was valid when the batch began
                raise OSError(f"line {number + 1} of a batch's input has changed: {error}") from error
            if digest_of(asked.custom_id) not in self._done:
                yield asked

    async def _place(self, asked: Asked, outputs: Written, errors: Written) -> None:
        outcome = await self._outcome(asked)
        good = outcome.response is not None and outcome.response.status_code < 400
        try:
            (outputs if good else errors).add(outcome)
            self._done.add(digest_of(asked.custom_id))
        except OSError as error:
            self._broken = error

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Give the place of a line to another one. A task that is cancelled before its first step runs no `finally` of
        its own, so the task's end does it."""
        self._tasks.discard(task)
        self._runner.places.release()

    async def _outcome(self, asked: Asked) -> Outcome:
        """Run a line until it has an answer of its own. One that the engine has died with runs while no other such line
        does, so that the one at fault is found."""
        runner, died = self._runner, 0
        while True:
            await runner.engine.until_up()
            if died:
                async with runner.suspects:
                    await runner.engine.until_up()
                    status, body, name, dead = await self._try(asked)
            else:
                status, body, name, dead = await self._try(asked)
            died += dead
            if status not in AGAIN or died >= TRIES:
                return Outcome(self._name(asked), asked.custom_id, Response(status, name, msgspec.Raw(body)), None)
            await asyncio.sleep(PAUSE)

    async def _try(self, asked: Asked) -> tuple[int, bytes, str, bool]:
        deaths, name = self._runner.engine.deaths(), new_id("req-batch-")
        status, body = await self._runner.call(asked.url, asked.body, name, self.batch.owner)
        return status, body, name, status == 503 and self._runner.engine.deaths() > deaths

    def _name(self, asked: Asked) -> str:
        return f"batch_req_{self.batch.id.removeprefix('batch_')}{asked.number:05x}"

    # ---- what others see --------------------------------------------------------------------------------------

    async def _watch(self, outputs: Written, errors: Written) -> None:
        """Write down the progress, and end the batch when it is cancelled or its time is over."""
        try:
            await self._watched(outputs, errors)
        except OSError as error:
            self._broken = error
        for task in self._tasks:
            task.cancel()

    async def _watched(self, outputs: Written, errors: Written) -> None:
        batch = self.batch
        while self._stop is None:
            before = batch.request_counts
            self._tell(outputs, errors)
            if batch.request_counts != before:
                await asyncio.to_thread(outputs.settle)
                await asyncio.to_thread(errors.settle)
                await self._save()
            when = await asyncio.to_thread(self._store.cancelled, batch.id)
            if when is not None:
                batch.cancelling_at, self._stop = when, "cancelled"
            elif batch.expires_at is not None and time.time() >= batch.expires_at:
                self._stop = "expired"
            else:
                await asyncio.sleep(LOOK)

    def _tell(self, outputs: Written, errors: Written) -> None:
        self.batch.request_counts = Counts(self.batch.request_counts.total, outputs.count, errors.count)
        self.batch.usage = Usage(**msgspec.structs.asdict(outputs.usage))

    async def _save(self) -> None:
        """Write down the batch as it is now. A thread writes on when this is cancelled, so a later one waits for it:
        otherwise what a slow disk took first could replace what came last."""
        await asyncio.to_thread(self._save_in_turn)

    def _save_in_turn(self) -> None:
        with self._saving:
            self._store.save(self.batch)


def _now() -> int:
    return int(time.time())
