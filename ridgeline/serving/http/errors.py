"""Failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, and in KServe's: {"error": message}."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.errors import BadRequest, RequestFailed, Unavailable

logger = logging.getLogger(__name__)


class RouteFailure(RequestFailed):
    """The path does not exist, or not with this method."""

    kind = "invalid_request_error"

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.code = {404: "not_found", 405: "method_not_allowed"}.get(status)


def failure_of(error: BaseException) -> RequestFailed:
    """Return the failure that the client is told of. It learns no more of our own mistakes than that there was one."""
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.param)
    if isinstance(error, HTTPException):
        return RouteFailure(error.status_code, f"{error.detail}.", dict(error.headers or {}))
    logger.error("a request failed inside the server", exc_info=error)
    return RequestFailed("the server failed on this request; its log says more.")


def error_body(failure: RequestFailed) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def kserve_error(failure: RequestFailed) -> dict[str, Any]:
    return {"error": failure.message}


def is_kserve(path: str) -> bool:
    """Return True for a path of KServe's protocol. Others share its /v2."""
    return path == "/v2" or path.startswith(("/v2/models/", "/v2/health/"))


def response_for(error: BaseException, told: Callable[[RequestFailed], dict[str, Any]] = error_body) -> Response:
    """Return the response to a failure, of which `told` makes the body. Every 429 and 503 has a Retry-After."""
    failure = failure_of(error)
    headers = dict(failure.headers) if isinstance(failure, RouteFailure) else {}
    retry_after = failure.retry_after
    if retry_after is None and failure.status in (429, Unavailable.status):
        retry_after = 1
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    content = msgspec.json.encode(told(failure))
    return Response(content, failure.status, headers, media_type="application/json")
