"""Answers to calls of methods that do not exist.

grpcio's asyncio server (seen in 1.84 and 1.85; not yet in 1.82) decodes the name of such a method in the loop that
takes calls, so a single call whose name is not UTF-8 ends the whole server. Here these calls are answered apart,
whatever their name is. This uses private parts of grpcio; a version without them keeps its own server.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from grpc._cython import cygrpc

NEEDED = ("_make_request_call_future", "_request_call")
NAME = "/unknown"  # stands for all names


class _NoMethods:
    def resolve_handler(self, details: Any) -> None:
        return None


class _Server(cygrpc.AioServer):
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._answer_unknown())

    async def _answer_unknown(self) -> None:
        """Answer such calls until the server ends, which raises."""
        loop, answering = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            state = await self._request_call()
            answer = cygrpc._handle_rpc(NAME, _NoMethods(), self.interceptors, state, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, NAME))
            answering.add(task)
            task.add_done_callback(answering.discard)


def make_server(interceptors: tuple[grpc.aio.ServerInterceptor, ...], options: list[Any]) -> grpc.aio.Server:
    """Return a `grpc.aio.server` that calls of unknown methods cannot end."""
    plain = cygrpc.AioServer
    if not all(hasattr(plain, name) for name in NEEDED):
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _Server
    try:
        server = grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
    server._server.interceptors = interceptors
    return server
