"""What every call passes: its key, its request id, and the one way in which calls fail.

Handlers raise what the rest of the server raises (RequestFailed, InvalidRequest); here that becomes a status, with
details in trailing metadata. Messages that are no protobuf are the client's mistake, not an internal error.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc.aio import ServicerContext as Context

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving import owner, trace_parent
from ridgeline.serving.errors import BadRequest, RequestFailed, SlowReader, TimedOut
from ridgeline.serving.grpc.bounds import INLINE_BYTES, check_message
from ridgeline.serving.keys import allowed, bearer
from ridgeline.serving.requests.bounded_json import off_loop

logger = logging.getLogger(__name__)

ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MOST_DETAIL = 500  # characters: status and metadata travel as headers, which clients bound
STALLED = 60.0  # seconds that one message may wait for a client that reads nothing, or for one that sends nothing
RETRY_AFTER = 1  # seconds, where trying again makes sense and nothing says when
PUSHBACK = "grpc-retry-pushback-ms"  # which clients obey that try again by themselves
# What tells nothing but whether the server works, and is asked by probes that have no key.
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
}


class Unauthenticated(RequestFailed):
    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class Guard(grpc.aio.ServerInterceptor):
    """keys: of which a call must bring one, as metadata "authorization: Bearer …" or "x-api-key: …"; where there are
    none, nobody is asked."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if details.method not in OPEN and not allowed(key_in(details.invocation_metadata), self._keys):
            return grpc.stream_stream_rpc_method_handler(_refuse)  # reads nothing, so it serves any kind of call
        handler = await continuation(details)
        return None if handler is None else _guarded(handler, with_keys=bool(self._keys))


def key_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The API key that a call came with."""
    return bearer(_value(metadata, "authorization")) or _value(metadata, "x-api-key")


def request_id_of(context: Context) -> str:
    """The id that this call goes by, which the client finds in its trailing metadata."""
    return _value(context.trailing_metadata(), ID) or ""


def rename(context: Context, request_id: str) -> None:
    """Let the call go by another id."""
    context.set_trailing_metadata(((ID, request_id),))


def failure_of(error: Exception) -> RequestFailed:
    """As clients are told of it. What nobody foresaw is logged, and they learn no more than that it happened."""
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.param)
    logger.error("a call failed", exc_info=error)
    return RequestFailed("the server failed on this request; its log says more.")


def _guarded(handler: Any, *, with_keys: bool) -> grpc.RpcMethodHandler:
    """The same handler, whose errors become statuses. (No service here has calls with a stream of requests and one
    response.) All are served as streams: the library leaves those without a message unanswered otherwise."""

    async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
        key = key_in(context.invocation_metadata()) if with_keys else None
        owner.take(key, context.peer().rpartition(":")[0])  # without the port
        messages = _read(requests, handler.request_deserializer)
        async with _answering(context):
            if handler.request_streaming:
                responses = handler.stream_stream(messages, context)
            elif handler.response_streaming:
                responses = handler.unary_stream(await _first(messages), context)
            else:
                responses = _one(handler.unary_unary(await _first(messages), context))
            await _send(responses, context)

    return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)


async def _send(responses: Any, context: Context) -> None:
    """Writing here rather than leaving it to the library: where the client goes away in the middle of a write, the
    generator ends at once, and its request with it."""
    async with aclosing(responses):
        async for response in responses:
            try:
                async with asyncio.timeout(STALLED):
                    await context.write(response)
            except TimeoutError:
                raise SlowReader(f"nothing was read for {STALLED:g} s; the request was cut.") from None


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    given = _value(context.invocation_metadata(), ID)
    trace_parent.take(context.invocation_metadata() or ())
    rename(context, given if given and SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}")
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if not context.done():  # else nobody is there to be told
            await _abort(context, failure_of(error))


async def _abort(context: Context, failure: RequestFailed) -> None:
    code = CODES.get(failure.status, grpc.StatusCode.INTERNAL)
    told = {ID: request_id_of(context), "type": failure.kind, "param": failure.param, "code": failure.code}
    if failure.status in (429, 503):
        wait = failure.retry_after or RETRY_AFTER
        told |= {"retry-after": str(wait), PUSHBACK: str(1000 * wait)}
    metadata = tuple((name, _printable(value)) for name, value in told.items() if value)
    await context.abort(code, failure.message[:MOST_DETAIL], metadata)


async def _refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
    async with _answering(context):
        raise Unauthenticated('the call brings no valid API key; send it as metadata "authorization: Bearer <key>".')


async def _read(requests: AsyncIterator[bytes], deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    """The messages. Large ones are counted and read in a thread."""
    async for data in requests:
        yield await off_loop(len(data), INLINE_BYTES, partial(_message, data, deserialize))


def _message(data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    check_message(data, deserialize)
    try:
        return deserialize(data)
    except Exception:  # the library has several, by implementation
        raise BadRequest(
            "the message is not what this method takes; check it against the service's .proto file."
        ) from None


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
    """Of the first entry so named that is text."""
    return next((value for key, value in metadata or () if key == name and isinstance(value, str)), None)


def _printable(value: str) -> str:
    """Metadata hold printable ASCII."""
    return re.sub(r"[^ -~]", "?", value)[:MOST_DETAIL]
