"""The path of a request as routes see it, and whose API it belongs to."""

from __future__ import annotations

from starlette.types import Scope

# APIs whose errors have a shape of their own
MESSAGES = "/v1/messages"  # Anthropic's
OLLAMAS = "/api"


def is_under(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def route_path(scope: Scope) -> str:
    """Return the path that routes are matched with, without the prefix that a proxy added."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(prefix) :] if prefix and is_under(prefix, path) else path


def is_anthropics(path: str) -> bool:
    return is_under(MESSAGES, path)


def is_ollamas(path: str) -> bool:
    return is_under(OLLAMAS, path)


def is_kserve(path: str) -> bool:
    """Return True for a path of KServe's protocol. Others share its /v2."""
    return path == "/v2" or path.startswith(("/v2/models/", "/v2/health/"))
