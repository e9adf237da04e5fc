"""A server for the router's tests, which says what it got and does as its requests ask.

    python -m tests.serving.routing.worker PORT MODEL[,MODEL…] [KEY CERTIFICATE]

A body's `pieces` events come `pause` seconds apart. With `led`, event n is written once `/go` was called n times more.
`cut` ends the process with a SIGKILL of its own after so many events, in the middle of the next one; -1 ends it before
there is an answer. `bytes` is the size of each event, and `half` that of the half event before the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

got: dict[str, Any] = {"requests": 0, "left": 0, "ready": True, "go": 0}


def app(models: list[str]) -> Starlette:
    async def ready(request: Request) -> Response:
        return Response(status_code=200 if got["ready"] else 503)

    async def unready(request: Request) -> Response:
        got["ready"] = False
        return Response()

    async def go(request: Request) -> Response:
        got["go"] += 1
        return Response()

    async def listed(request: Request) -> Response:
        if request.headers.get("authorization") == "Bearer wrong":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        data = [{"id": name, "object": "model", "pid": os.getpid()} for name in models]
        return JSONResponse({"object": "list", "data": data})

    async def counted(request: Request) -> Response:
        return JSONResponse({**got, "pid": os.getpid()})

    async def answer(request: Request) -> Response:
        got["requests"] += 1
        before = got["go"]
        raw = await request.body()
        body = json.loads(raw or b"{}")
        if body.get("cut") == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        if body.get("stream"):
            form = "application/x-ndjson" if request.url.path.startswith("/api") else "text/event-stream"
            return StreamingResponse(events(body, form, before), media_type=form)
        await asyncio.sleep(body.get("pause", 0))
        told = {
            "id": f"resp_{got['requests']}_{os.getpid()}",
            "pid": os.getpid(),
            "path": request.scope["raw_path"].decode(),
            "query": request.url.query,
            "headers": request.headers.items(),
            "size": len(raw),
        }
        headers = {"x-request-id": request.headers.get("x-request-id", ""), "connection": "x-hop", "x-hop": "1"}
        return JSONResponse(told, headers={**headers, "keep-alive": "timeout=5", "x-kept": "yes"})

    async def events(body: dict[str, Any], form: str, before: int) -> Any:
        try:
            for number in range(body.get("pieces", 3)):
                while body.get("led") and got["go"] < before + number:
                    await asyncio.sleep(0.005)
                event = json.dumps({"n": number, "pid": os.getpid(), "x": "x" * body.get("bytes", 0)})
                if number == body.get("cut"):
                    yield "data: " + event[:5] + "x" * body.get("half", 0)
                    await asyncio.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield event + "\n" if form.endswith("ndjson") else f"data: {event}\n\n"
                await asyncio.sleep(body.get("pause", 0))
            if not form.endswith("ndjson"):
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            got["left"] += 1
            raise

    return Starlette(
        routes=[
            Route("/health/ready", ready),
            Route("/v1/models", listed),
            Route("/counted", counted),
            Route("/unready", unready, methods=["POST"]),
            Route("/go", go, methods=["POST"]),
            Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"]),
        ]
    )


if __name__ == "__main__":
    key, certificate = sys.argv[3:] or (None, None)
    uvicorn.run(
        app(sys.argv[2].split(",")), port=int(sys.argv[1]), log_level="warning", ws="none",
        ssl_keyfile=key, ssl_certfile=certificate,
    )  # fmt: skip
