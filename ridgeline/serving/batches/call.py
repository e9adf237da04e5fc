"""Requests to the server's own application, without a connection in between."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message

from ridgeline.serving import owner

logger = logging.getLogger(__name__)

FAILED = msgspec.json.encode(
    {
        "error": {
            "message": "the server failed on this request; its log says more.",
            "type": "internal_error",
            "param": None,
            "code": None,
        }
    }
)


async def call(app: ASGIApp, path: str, body: bytes, request_id: str, whose: str) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a POST of JSON, which is `whose` request."""
    owner.set_to(whose)
    asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, said = 500, bytearray()

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()  # this client never leaves: it is cancelled
        return asked.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            said.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        "state": {"request_id": request_id},
    }
    try:
        await app(scope, receive, send)
    except Exception:
        logger.exception("the request %s failed inside the server", request_id)
        return 500, FAILED
    return status, bytes(said) or FAILED
