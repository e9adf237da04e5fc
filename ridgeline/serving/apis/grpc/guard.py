"""The guard that every call passes: it checks the key, names the request, and turns errors into statuses.

Handlers raise the same errors as the rest of the server (RequestFailed, InvalidRequest). The guard answers with a
status and puts the details into trailing metadata. A message that is no protobuf is the client's mistake and not an
internal error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc.aio import ServicerContext as Context

from ridgeline.serving import owner, trace_parent
from ridgeline.serving.apis.grpc.bounds import INLINE_BYTES, check_message
from ridgeline.serving.errors import BadRequest, RequestFailed, SlowReader, TimedOut, Unauthenticated, failure_of
from ridgeline.serving.keys import allowed, bearer
from ridgeline.serving.shares import off_loop

ID = "x-request-id"
MOST_DETAIL = 500  # characters: status and metadata travel as headers, whose size clients bound
STALLED = 60.0  # seconds that a message may wait for a client that reads nothing, or for one that sends nothing
RETRY_AFTER = 1  # seconds, where trying again makes sense and the failure does not say when
PUSHBACK = "grpc-retry-pushback-ms"  # obeyed by clients that try again by themselves
# Calls that tell only whether the server works. Probes make them and have no key.
OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.ABORTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor that checks keys and wraps every handler.

    A call must bring one of `keys`, as metadata "authorization: Bearer …" or "x-api-key: …". If there are no keys,
    every call is allowed. A key in `trusted` may name the tenant, in metadata "x-ridgeline-tenant".
    """

    def __init__(self, keys: Sequence[str], trusted: Sequence[str] = ()) -> None:
        self._keys, self._trusted = keys, trusted

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if details.method not in OPEN and not allowed(key_in(details.invocation_metadata), self._keys):
            return grpc.stream_stream_rpc_method_handler(_refuse)  # reads nothing, so it serves any kind of call
        handler = await continuation(details)
        return None if handler is None else _guarded(handler, self._owned)

    def _owned(self, context: Context) -> None:
        """Set the owner of a call."""
        metadata = context.invocation_metadata()
        key, peer = key_in(metadata) if self._keys else None, context.peer().rpartition(":")[0]  # without the port
        owner.take(key, peer, trusted=self._trusted, name=_value(metadata, owner.HEADER))


def key_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the API key that a call came with."""
    return bearer(_value(metadata, "authorization")) or _value(metadata, "x-api-key")


def request_id_of(context: Context) -> str:
    """Return the id of this call, which the client finds in the trailing metadata."""
    return _value(context.trailing_metadata(), ID) or ""


def rename(context: Context, request_id: str) -> None:
    """Give the call another id."""
    context.set_trailing_metadata(((ID, request_id),))


def _guarded(handler: Any, owned: Callable[[Context], None]) -> grpc.RpcMethodHandler:
    """Return the same handler with its errors turned into statuses.

    All handlers are served as streams, because the library otherwise leaves calls without a message unanswered. No
    service here has calls with a stream of requests and one response.
    """

    async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
        messages = _read(requests, handler.request_deserializer)
        async with _answering(context):
            owned(context)
            if handler.request_streaming:
                responses = handler.stream_stream(messages, context)
            elif handler.response_streaming:
                responses = handler.unary_stream(await _first(messages), context)
            else:
                responses = _one(handler.unary_unary(await _first(messages), context))
            await _send(responses, context)

    return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)


async def _send(responses: Any, context: Context) -> None:
    """Write the responses to the client. If the client goes away in the middle of a write, the generator ends at once
    and its request with it; the library would not do that if it wrote them itself."""
    async with aclosing(responses):
        async for response in responses:
            try:
                async with asyncio.timeout(STALLED):
                    await context.write(response)
            except TimeoutError:
                raise SlowReader(f"nothing was read for {STALLED:g} s; the request was cut.") from None


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    trace_parent.take(context.invocation_metadata() or ())
    rename(context, trace_parent.name_of(_value(context.invocation_metadata(), ID)))
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if not context.done():  # otherwise the client is gone
            await _abort(context, failure_of(error))


async def _abort(context: Context, failure: RequestFailed) -> None:
    code = CODES.get(failure.status, grpc.StatusCode.INTERNAL)
    told = {ID: request_id_of(context), "type": failure.kind, "param": failure.param, "code": failure.code}
    if failure.status in (429, 503, 507):
        wait = failure.retry_after or RETRY_AFTER
        told |= {"retry-after": str(wait), PUSHBACK: str(1000 * wait)}
    metadata = tuple((name, _printable(value)) for name, value in told.items() if value)
    await context.abort(code, failure.message[:MOST_DETAIL], metadata)


async def _refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
    async with _answering(context):
        raise Unauthenticated('the call brings no valid API key; send it as metadata "authorization: Bearer <key>".')


async def _read(requests: AsyncIterator[bytes], deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """Yield the decoded messages. Large ones are counted and decoded in a thread."""
    async for data in requests:
        yield await off_loop(len(data), INLINE_BYTES, partial(_message, data, deserialize))


def _message(data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    check_message(data, deserialize)
    try:
        return deserialize(data)
    except Exception:  # the library raises different errors, depending on its implementation
        raise BadRequest("this method cannot decode the message; check it against the service's .proto file.") from None


async def _first(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(STALLED):
            return await anext(requests)
    except TimeoutError:
        raise TimedOut(f"no message came within {STALLED:g} s.") from None
    except StopAsyncIteration:
        raise BadRequest("the call brings no message; send the one that this method takes.") from None


async def _one(response: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await response


def _value(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str | None:
    """Return the value of the first entry of this name that is text."""
    return next((value for key, value in metadata or () if key == name and isinstance(value, str)), None)


def _printable(value: str) -> str:
    """Return the text in printable ASCII, which is all that metadata hold."""
    return re.sub(r"[^ -~]", "?", value)[:MOST_DETAIL]
