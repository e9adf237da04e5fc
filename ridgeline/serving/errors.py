"""The failures of requests, with HTTP's status and gRPC's for each."""

from __future__ import annotations

import logging

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.lacking import lacking

logger = logging.getLogger(__name__)


class RequestFailed(Exception):
    """A request that failed.

    `status` is HTTP's, from which gRPC's follows. `kind`, `code` and `param` are OpenAI's `type`, `code` and `param`.
    `retry_after` is the number of seconds after which trying again makes sense.
    """

    status = 500
    kind = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after = message, param, retry_after


class BadRequest(RequestFailed):
    status, kind = 400, "invalid_request_error"


class TooLong(BadRequest):
    """The request has more tokens than the context or the cache holds."""

    code = "context_length_exceeded"


class Unauthenticated(RequestFailed):
    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class ModelNotFound(BadRequest):
    status, code = 404, "model_not_found"


class Overloaded(RequestFailed):
    """The queue is full: there is more to do than this server takes on."""

    status, kind, code = 429, "rate_limit_error", "queue_full"


class NotPromised(Overloaded):
    """The request's objective cannot be met now; the message says what could."""

    code = "objective_not_met"


class Unavailable(RequestFailed):
    """The engine is starting or gone, or the server is about to end."""

    status, kind, code = 503, "service_unavailable", "engine_unavailable"


class GrammarsBusy(Unavailable):
    """A grammar could not be checked in time, and that was not its fault."""

    code = "grammars_busy"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)


class TimedOut(RequestFailed):
    status, kind, code = 504, "timeout_error", "timeout"


class SlowReader(RequestFailed):
    """The client does not read what it asked for."""

    status, kind, code = 408, "timeout_error", "slow_reader"


class Aborted(RequestFailed):
    """Another call ended the request."""

    status, kind, code = 499, "request_aborted", "request_aborted"


class EngineFailed(RequestFailed):
    """The engine ended this request with an error of its own."""

    code = "engine_error"


class NoRoom(RequestFailed):
    """The system has no room for what the request needs (`core.lacking`), or a bound of the server's is reached."""

    status, kind, code = 507, "insufficient_storage", "storage_full"


def lack_of(error: BaseException) -> NoRoom | None:
    """Return the failure of a request where the system lacks room, or None if this error is another."""
    if (what := lacking(error)) is None:
        return None
    return NoRoom(f"the server has no room for this now: {what}; try again later.", retry_after=30)


def failure_of(error: BaseException) -> RequestFailed:
    """Return the failure that the client gets, over HTTP and gRPC. It learns no more of our own mistakes than that
    there was one; the log says the rest."""
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.param)
    if (lack := lack_of(error)) is not None:
        logger.error("a request found no room: %s", error)
        return lack
    logger.error("a request failed inside the server", exc_info=error)
    return RequestFailed("the server failed on this request; its log says more.")
