"""The answers that all API servers of one server keep. Each keeps its own, and asks the others for theirs.

    kept = Kept(place=2, count=4, folder=folder)
    async with kept.listening():
        record = await kept.find(name, tenant)

The name of an answer ends with the number of the API server that keeps it, so it is known which to ask. They speak over
Unix sockets in the server's own folder: a frame with a question, and one with the answer to it. Where that API server
has died, its answers are gone with it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import struct
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.serving.errors import BadRequest, Unavailable
from ridgeline.serving.kept.store import Log, Record, Store

logger = logging.getLogger(__name__)

SOCKET = "kept"  # how the names of sockets begin
MOST_BYTES = 256 << 20  # of all answers of all API servers
PATIENCE = 10.0  # seconds for another API server's answer
POLL = 10.0  # seconds after which a reader of events asks again
LARGEST_QUESTION = 1 << 12  # bytes
EVENTS_AT_ONCE = 1 << 20  # bytes
NAME = re.compile(r"(?:resp|msg|rs|fc|fco|ctc|ctco)_([0-9a-f]{32})([1-9][0-9]{0,3})(?:_([io])([0-9]{1,6}))?")
LENGTH = struct.Struct("<I")

Op = Literal["find", "events", "cancel", "delete"]


class Found(msgspec.Struct, frozen=True):
    """The part of a record that others may know, with fields as in `Record`."""

    body: bytes
    turns: tuple[bytes, ...]
    background: bool
    runs: bool
    streamed: bool


class Events(msgspec.Struct, frozen=True):
    """Some events of an answer, from the one that was asked for on. `ended` means that these are the last."""

    events: list[bytes]
    ended: bool
    forgotten: bool


class Question(msgspec.Struct, frozen=True, array_like=True):
    op: Op
    name: str
    tenant: str
    start: int = 0


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`found` or `events` for what there is. `refused` is a sentence for what cannot be done."""

    found: Found | None = None
    events: Events | None = None
    refused: str | None = None


_questions, _replies = msgspec.msgpack.Decoder(Question), msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode


class Kept:
    """The answers that are kept, as one API server sees them.

    place: its number among `count`, from 1.
    folder: where the sockets are (None: there are no others).
    most: answers of all API servers together, each of which keeps its share (0: none are kept).
    """

    def __init__(self, place: int = 1, count: int = 1, folder: Path | None = None, most: int = 0) -> None:
        self.place, self._count, self._folder = place, count, folder
        self.store = Store(-(-most // count), MOST_BYTES // count)

    @property
    def keeps(self) -> bool:
        return self.store.most > 0

    def new_name(self) -> str:
        """Return the name of a new answer, which cannot be guessed."""
        return f"resp_{uuid.uuid4().hex}{self.place}"

    async def find(self, name: str, tenant: str) -> Found | None:
        return (await self._ask(Question("find", name, tenant))).found

    async def events(self, name: str, tenant: str, start: int) -> Events | None:
        """Return events from `start` on, as soon as there are some. There may be none after a while."""
        return (await self._ask(Question("events", name, tenant, start))).events

    async def cancel(self, name: str, tenant: str) -> Found | None:
        """End an answer that is written in the background. Raise BadRequest for another."""
        reply = await self._ask(Question("cancel", name, tenant))
        if reply.refused is not None:
            raise BadRequest(reply.refused, param="response_id")
        return reply.found

    async def delete(self, name: str, tenant: str) -> Found | None:
        """Forget an answer, and end it if it is still written."""
        return (await self._ask(Question("delete", name, tenant))).found

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer the other API servers' questions meanwhile."""
        if self._folder is None or self._count == 1:
            yield
            return
        path = self._folder / f"{SOCKET}-{self.place}"
        path.unlink(missing_ok=True)  # of an earlier life
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    # ---- questions --------------------------------------------------------------------------------------------

    async def _ask(self, question: Question) -> Reply:
        known = NAME.fullmatch(question.name)
        place = int(known[2]) if known else 0
        if place == self.place:
            return await self._answer(question)
        if self._folder is None or not 1 <= place <= self._count:
            return Reply()
        try:
            async with asyncio.timeout(PATIENCE + POLL):
                return await _exchange(self._folder / f"{SOCKET}-{place}", question)
        except (FileNotFoundError, ConnectionError, asyncio.IncompleteReadError):
            return Reply()  # it has died, and what it kept is gone
        except TimeoutError:
            raise Unavailable("the API server that keeps this answer is too busy; try again.", retry_after=1) from None

    async def _answer(self, question: Question) -> Reply:
        record = self.store.find(question.name, question.tenant)
        if record is None:
            return Reply()
        match question.op:
            case "events":
                return Reply(events=await _events(record.log, question.start))
            case "cancel" if not record.background:
                return Reply(refused="this answer was not made in the background, so it cannot be cancelled.")
            case "cancel":
                await _end(record)
            case "delete":
                self.store.remove(record)
                await _end(record)
        streamed = record.log is not None
        return Reply(found=Found(record.body, record.turns, record.background, record.runs, streamed))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = _questions.decode(await _read(reader, LARGEST_QUESTION))
            await _write(writer, _encode(await self._answer(question)))
        except (OSError, EOFError, msgspec.DecodeError, ValueError) as error:
            logger.warning("a question of another API server could not be answered (%s)", error)
        finally:
            writer.close()


async def _exchange(path: Path, question: Question) -> Reply:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        await _write(writer, _encode(question))
        return _replies.decode(await _read(reader, 2**32))
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > most:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(LENGTH.pack(len(data)))
    writer.write(data)
    await writer.drain()


async def _events(log: Log | None, start: int) -> Events | None:
    if log is None:
        return None
    if len(log.events) <= start and not (log.ended or log.forgotten):
        await log.wait(POLL)
    events, size = list[bytes](), 0
    for event in log.events[start:]:
        events.append(event)
        size += len(event)
        if size > EVENTS_AT_ONCE:
            break
    return Events(events, log.ended and start + len(events) >= len(log.events), log.forgotten)


async def _end(record: Record) -> None:
    """End what still writes an answer."""
    task: asyncio.Task[Any] | None = record.task
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
