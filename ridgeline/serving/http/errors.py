"""Failures in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, in Anthropic's for its routes, and in
KServe's and Ollama's, {"error": message}, for theirs."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from ridgeline.serving import errors
from ridgeline.serving.errors import RequestFailed, Unavailable
from ridgeline.serving.http import answers
from ridgeline.serving.http.paths import is_anthropics, is_kserve, is_ollamas, route_path

ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class RouteFailure(RequestFailed):
    """The path does not exist, or not with this method."""

    kind = "invalid_request_error"

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.code = {404: "not_found", 405: "method_not_allowed"}.get(status)


def failure_of(error: BaseException) -> RequestFailed:
    """Return the failure that the client gets: of a route, or as over gRPC."""
    if isinstance(error, HTTPException):
        return RouteFailure(error.status_code, f"{error.detail}.", dict(error.headers or {}))
    return errors.failure_of(error)


def error_of(failure: RequestFailed) -> answers.ErrorAnswer:
    """Return a failure's body in OpenAI's shape."""
    error = answers.Error(message=failure.message, type=failure.kind, param=failure.param, code=failure.code)
    return answers.ErrorAnswer(error=error)


def anthropics_error(failure: RequestFailed, request_id: str | None) -> answers.AnthropicsErrorAnswer:
    """Return a failure's body for Anthropic's clients. They know the kind of a failure by its name."""
    kind = ANTHROPICS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    error = answers.AnthropicsError(type=kind, message=failure.message)
    return answers.AnthropicsErrorAnswer(error=error, request_id=request_id)


def body_for(failure: RequestFailed, scope: Scope) -> answers.Answer:
    """Return the body in the shape of the API that was asked."""
    path = route_path(scope)
    if is_anthropics(path):
        return anthropics_error(failure, scope.get("state", {}).get("request_id"))
    if is_ollamas(path):
        return answers.OllamasError(error=failure.message)
    return answers.KServeFailure(error=failure.message) if is_kserve(path) else error_of(failure)


def response_for(error: BaseException, scope: Scope) -> Response:
    """Return the response to a failure. Every 429 and 503 has a Retry-After."""
    failure = failure_of(error)
    headers = dict(failure.headers) if isinstance(failure, RouteFailure) else {}
    retry_after = failure.retry_after
    if retry_after is None and failure.status in (429, Unavailable.status):
        retry_after = 1
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    content = msgspec.json.encode(body_for(failure, scope))
    return Response(content, failure.status, headers, media_type="application/json")
