"""The routes of files and batches: /v1/files and /v1/batches, as OpenAI's.

They only read and write the folder of batches (--batch-dir). A process of its own runs what is in it, so any API server
may be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Match

from ridgeline.media.bounds import MediaBounds
from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.batches.lines import ENDPOINTS
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http import answers
from ridgeline.serving.http.attachment import attachment
from ridgeline.serving.http.describe import answers as answers_of
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import ClientGone, read_body
from ridgeline.serving.http.multipart import Form, read_form
from ridgeline.serving.http.pieces import json_of
from ridgeline.serving.requests.batches import BatchBody, ExpiresAfter, seconds_of
from ridgeline.serving.requests.validation import parse
from ridgeline.serving.stored.records import BATCH_ID, FILE_ID, SHOWN_PURPOSES, Batch, Purpose, StoredFile, new_id
from ridgeline.serving.stored.store import KEPT, OFF, NoSuchEntry, Store

PURPOSES = ("batch", *SHOWN_PURPOSES)
MOST_LISTED = {"file": 10_000, "batch": 100}
SHOWN_BYTES = MediaBounds().file_bytes
PIECE = 1 << 20  # bytes of an upload that are written at a time
RESERVED = 4 << 20  # bytes of an upload of unknown length that count before they come
FORM_SCHEMA = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer"},
                },
            }
        }
    },
}

_Item = TypeVar("_Item", StoredFile, Batch)
_Result = TypeVar("_Result")


def endpoints_of(app: FastAPI) -> list[str]:
    """Return the endpoints of batches that an app has."""

    def has(path: str) -> bool:
        scope = {"type": "http", "path": path, "root_path": "", "method": "POST", "headers": []}
        return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)

    return [path for path in ENDPOINTS if has(path)]


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter()

    def store() -> Store:
        if api.files is None:
            raise BadRequest(OFF)
        return api.files

    async def apart(work: Callable[[], _Result]) -> _Result:
        return await asyncio.to_thread(work)

    # ---- files ------------------------------------------------------------------------------------------------

    @routes.post(
        "/v1/files",
        tags=["files"],
        summary="Upload a file of requests, a picture, a video or a sound",
        responses=answers_of(answers.File, 400, 413, 507),
        openapi_extra={"requestBody": FORM_SCHEMA},
    )
    async def upload(request: Request) -> dict[str, Any]:
        files = store()
        length = request.headers.get("content-length", "")
        most = api.config.batch_file_bytes
        room = min(int(length) if length.isdecimal() else RESERVED, most)
        path = await apart(lambda: files.begin(room))
        try:
            form, size = await _received(request, files, path, room, most)
            record = _described(form, size, owner.tenant())
            added = await apart(lambda: files.add(path, record))
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(files.drop, path))
            if isinstance(error, ClientDisconnect):
                raise ClientGone from error
            raise
        return added.shown()

    @routes.get("/v1/files", tags=["files"], summary="The files", responses=answers_of(answers.FileList, 400))
    async def list_files(
        purpose: str | None = None, limit: str = "10000", order: str = "desc", after: str | None = None
    ) -> dict[str, Any]:
        files, mine, count = store(), owner.tenant(), _limit(limit, "file")
        if order not in ("asc", "desc"):
            raise BadRequest(f"order is asc or desc, got {order[:40]!r}.", param="order")

        def listed() -> list[StoredFile]:
            found = (each for each in files.list_files(mine) if purpose in (None, each.purpose))
            return _page(found if order == "desc" else iter(list(found)[::-1]), after, count)

        return _listed(await apart(listed), count)

    @routes.get(
        "/v1/files/{file_id}", tags=["files"], summary="What is known of one", responses=answers_of(answers.File, 404)
    )
    async def retrieve_file(file_id: str) -> dict[str, Any]:
        files, mine, name = store(), owner.tenant(), _named(file_id, "File")
        return (await apart(lambda: files.file(name, mine))).shown()

    @routes.delete(
        "/v1/files/{file_id}", tags=["files"], summary="Delete it", responses=answers_of(answers.FileDeleted, 404)
    )
    async def delete_file(file_id: str) -> Response:
        files, mine, name = store(), owner.tenant(), _named(file_id, "File")
        await apart(lambda: files.delete_file(name, mine))
        return json_of(answers.FileDeleted(id=name))

    @routes.get("/v1/files/{file_id}/content", tags=["files"], summary="Its content", response_class=Response)
    async def content(file_id: str) -> Response:
        files, mine, name = store(), owner.tenant(), _named(file_id, "File")
        found = await apart(lambda: files.file(name, mine))
        headers = {"Content-Disposition": attachment(found.filename), "X-Content-Type-Options": "nosniff"}
        return FileResponse(files.content(name), media_type="application/octet-stream", headers=headers)

    # ---- batches ----------------------------------------------------------------------------------------------

    @routes.post("/v1/batches", tags=["batches"], **described(BatchBody, "Run a file's requests", answers.Batch))
    async def create(request: Request) -> dict[str, Any]:
        batches, mine = store(), owner.tenant()
        body = await read_body(request, BatchBody)
        paths = endpoints_of(request.app)
        if body.endpoint not in paths:
            known = ", ".join(paths)
            raise BadRequest(f"endpoint is one of {known}, got {body.endpoint!r}.", param="endpoint")
        window, name = seconds_of(body.completion_window), _named(body.input_file_id, "File", "input_file_id")

        def made() -> Batch:
            file = batches.file(name, mine)
            if file.purpose != "batch":
                raise BadRequest(f"the file's purpose is {file.purpose}; it must be batch.", param="input_file_id")
            now = int(time.time())
            expires = body.output_expires_after
            batch = Batch(
                id=new_id("batch_"),
                endpoint=body.endpoint,
                input_file_id=name,
                completion_window=body.completion_window,
                created_at=now,
                expires_at=now + window,
                metadata=body.metadata,
                owner=mine,
                output_seconds=expires.seconds if expires is not None else KEPT,
            )
            return batches.create(batch, batches.content(name))

        return (await apart(made)).shown()

    @routes.get("/v1/batches", tags=["batches"], summary="The batches", responses=answers_of(answers.BatchList, 400))
    async def list_batches(limit: str = "20", after: str | None = None) -> dict[str, Any]:
        batches, mine, count = store(), owner.tenant(), _limit(limit, "batch")
        return _listed(await apart(lambda: _page(batches.list_batches(mine), after, count)), count)

    @routes.get(
        "/v1/batches/{batch_id}",
        tags=["batches"],
        summary="How far one is",
        responses=answers_of(answers.Batch, 404),
    )
    async def retrieve(batch_id: str) -> dict[str, Any]:
        batches, mine, name = store(), owner.tenant(), _named(batch_id, "Batch")
        return (await apart(lambda: batches.batch(name, mine))).shown()

    @routes.post(
        "/v1/batches/{batch_id}/cancel",
        tags=["batches"],
        summary="End it",
        responses=answers_of(answers.Batch, 400, 404),
    )
    async def cancel(batch_id: str) -> dict[str, Any]:
        batches, mine, name = store(), owner.tenant(), _named(batch_id, "Batch")

        def cancelled() -> Batch:
            batch = batches.batch(name, mine)
            if batch.final:
                raise BadRequest(f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id")
            batches.cancel(name)
            return batches.batch(name, mine)

        return (await apart(cancelled)).shown()

    return routes


# ---- uploads --------------------------------------------------------------------------------------------------------


async def _received(request: Request, files: Store, path: Path, room: int, most: int) -> tuple[Form, int]:
    """Write the file of a form to `path`, and return the form and the file's size. It has room for `room` bytes, and
    gets more as they come. Raise BadRequest or StoreFull."""
    held, size = bytearray(), 0

    async def take(piece: bytes) -> None:
        nonlocal size, room
        size += len(piece)
        if size > most:
            raise BadRequest(f"the file is longer than {most} bytes (--batch-file-bytes); divide it.", param="file")
        if size > room:
            room = min(max(size, room + RESERVED), most)
            await asyncio.to_thread(files.reserve, path, room)
        held.extend(piece)
        if len(held) >= PIECE:
            await asyncio.to_thread(_write, file, held)

    file = await asyncio.to_thread(path.open, "r+b", 0)
    with contextlib.closing(file):
        form = await read_form(request.headers.get("content-type", ""), _pieces(request), "file", take)
        await asyncio.to_thread(_write, file, held)
        await asyncio.to_thread(file.truncate, size)
    return form, size


def _write(file: Any, held: bytearray) -> None:
    view = memoryview(bytes(held))
    while view:
        view = view[file.write(view) :]
    held.clear()


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


def _described(form: Form, size: int, mine: str) -> StoredFile:
    """Return the record of an uploaded file. Raise BadRequest if the form does not say what is needed."""
    if form.filename is None:
        raise BadRequest("the form has no file.", param="file")
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        raise BadRequest(f"purpose is one of {', '.join(PURPOSES)}, got {str(purpose)[:80]!r}.", param="purpose")
    if purpose in SHOWN_PURPOSES and size > SHOWN_BYTES:
        message = f"the file has {size} bytes, and a {purpose} file at most {SHOWN_BYTES}; send a smaller one."
        raise BadRequest(message, param="file")
    given = {name: form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    seconds = KEPT
    if any(value is not None for value in given.values()):
        seconds = parse(ExpiresAfter, {name: value for name, value in given.items() if value is not None}).seconds
    for name in form.fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        raise BadRequest(f"the form has an unknown field, {name[:80]!r}; leave it out.", param=name[:80])
    now = int(time.time())
    return StoredFile(
        id=new_id("file-"),
        bytes=size,
        created_at=now,
        filename=form.filename[:255],
        purpose=cast("Purpose", purpose),
        expires_at=now + seconds,
        owner=mine,
    )


# ---- lists ----------------------------------------------------------------------------------------------------------


def _named(given: str, kind: str, param: str = "id") -> str:
    """Return an id, which becomes part of a path. Raise NoSuchEntry for anything else."""
    if not (FILE_ID if kind == "File" else BATCH_ID).fullmatch(given):
        raise NoSuchEntry(f"No such {kind} object: {given[:80]}", param=param)
    return given


def _limit(given: str, kind: str) -> int:
    most = MOST_LISTED[kind]
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise BadRequest(f"limit is a whole number from 1 to {most}, got {given[:40]!r}.", param="limit")
    return int(given)


def _page(found: Iterator[_Item], after: str | None, count: int) -> list[_Item]:
    """Return the items behind the one called `after`, and one more than asked for, if there are so many."""
    if after is not None and all(each.id != after for each in found):
        raise BadRequest(f"there is nothing called {after[:80]!r} in this list.", param="after")
    return list(islice(found, count + 1))


def _listed(found: Sequence[StoredFile | Batch], count: int) -> dict[str, Any]:
    shown = [each.shown() for each in found[:count]]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(found) > count}
