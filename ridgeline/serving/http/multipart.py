"""Forms with files (multipart/form-data, RFC 7578), read as they come and never held in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message
from email.parser import HeaderParser
from email.policy import HTTP
from typing import NamedTuple

from ridgeline.serving.errors import BadRequest

MOST_PARTS = 32
LONGEST_HEAD = 8 << 10  # bytes of a part's headers
LONGEST_FIELD = 4 << 10  # bytes of a part that is no file
BOUNDARY = re.compile(r"""[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]""")

Take = Callable[[bytes], Awaitable[None]]


class Form(NamedTuple):
    """The fields of a form by name, the last of each, and the name of its file. listed: all values of each name."""

    fields: dict[str, str]
    filename: str | None
    listed: dict[str, list[str]]


async def read_form(kind: str, pieces: AsyncIterator[bytes], file: str, take: Take) -> Form:
    """Read a form whose content type is `kind`, and give the content of the part called `file` to `take`, piece by
    piece. Raise BadRequest for a form that is none, or holds too much."""
    reader = _Reader(_boundary(kind), pieces)
    fields: dict[str, str] = {}
    listed: dict[str, list[str]] = {}
    filename: str | None = None
    await reader.skip_to_first()
    for _ in range(MOST_PARTS):
        if await reader.at_end():
            return Form(fields, filename, listed)
        name, given = _names(await reader.head())
        if name == file:
            if filename is not None:
                raise BadRequest(f"the form has more than one {file}; send them one by one.", param=file)
            filename = given or "file"
            await reader.content(take)
        else:
            held = bytearray()

            async def keep(piece: bytes, held: bytearray = held, name: str = name) -> None:
                held.extend(piece)
                if len(held) > LONGEST_FIELD:
                    raise BadRequest(f"{name[:64]} is longer than {LONGEST_FIELD} bytes.", param=name[:64])

            await reader.content(keep)
            fields[name] = held.decode("utf-8", "replace")
            listed.setdefault(name, []).append(fields[name])
    raise BadRequest(f"the form has more than {MOST_PARTS} parts; send fewer.")


class _Reader:
    """A reader of parts. `_held` has what came and was not read yet: one piece of the connection, and some bytes."""

    def __init__(self, boundary: bytes, pieces: AsyncIterator[bytes]) -> None:
        self._mark = b"\r\n--" + boundary
        self._pieces = pieces
        self._held = b"\r\n"  # so that the first boundary looks like every other

    async def skip_to_first(self) -> None:
        async def drop(piece: bytes) -> None:
            if piece.strip():
                raise BadRequest("the form does not begin with its boundary.")

        await self.content(drop)

    async def at_end(self) -> bool:
        """Return True behind the last boundary. Otherwise a part's head follows."""
        while len(self._held) < 2:
            await self._more()
        if self._held.startswith(b"--"):
            return True
        line = await self._until(b"\r\n")
        if line.strip():
            raise BadRequest("the form has something else behind a boundary.")
        return False

    async def head(self) -> bytes:
        return await self._until(b"\r\n\r\n")

    async def content(self, take: Take) -> None:
        """Give the bytes before the next boundary to `take`."""
        while (at := self._held.find(self._mark)) < 0:
            safe = len(self._held) - len(self._mark) + 1  # a boundary may have begun in what follows
            if safe > 0:
                await take(self._held[:safe])
                self._held = self._held[safe:]
            await self._more()
        await take(self._held[:at])
        self._held = self._held[at + len(self._mark) :]

    async def _until(self, end: bytes) -> bytes:
        while (at := self._held.find(end)) < 0:
            if len(self._held) > LONGEST_HEAD:
                raise BadRequest(f"the headers of a part are longer than {LONGEST_HEAD} bytes.")
            await self._more()
        found, self._held = self._held[:at], self._held[at + len(end) :]
        return found

    async def _more(self) -> None:
        try:
            self._held += await anext(self._pieces)
        except StopAsyncIteration:
            raise BadRequest("the form ends before its last boundary.") from None


def _boundary(kind: str) -> bytes:
    head = Message()
    head["content-type"] = kind
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise BadRequest("the body must be a form with a file: multipart/form-data, with its boundary.")
    if not BOUNDARY.fullmatch(boundary):
        raise BadRequest("the boundary of the form is not valid.")
    return boundary.encode()


def _names(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and that of its file."""
    found = HeaderParser(policy=HTTP).parsestr(head.decode("utf-8", "replace"))
    disposition = found.get("content-disposition")
    params = getattr(disposition, "params", {})
    name = params.get("name")
    if not name:
        raise BadRequest("a part of the form has no name.")
    filename = params.get("filename")
    return str(name), None if filename is None else str(filename)
