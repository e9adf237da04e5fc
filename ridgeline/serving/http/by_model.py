"""The application of a server with several models: each request goes to the application of the model that it names.

A request names its model in its body, in its query (`?model=`), or in its path, as KServe's clients do. A request that
names no model, or an unknown one in its body, goes to the first application, whose routes answer with the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import ModelNotFound
from ridgeline.serving.http.errors import response_for
from ridgeline.serving.http.exchange import replayed
from ridgeline.serving.http.paths import is_under, route_path
from ridgeline.serving.requests.bounded_json import INLINE_BYTES
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.shares import off_loop

KSERVE = "/v2/models/"
LATEST = ":latest"  # the tag that Ollama's clients add to names without one


SHOWN = "/api/show"  # of Ollama, whose older clients say `name` for the model


class _Named(msgspec.Struct):
    model: Any = None
    name: Any = None


_decoder = msgspec.json.Decoder(_Named)


def by_model(apps: Sequence[ASGIApp], models: Sequence[ApiServer]) -> ASGIApp:
    """Return the application of all these models, each of which has one. Bodies must come in one piece."""
    if len(apps) == 1:
        return apps[0]
    known = {name: app for api, app in zip(models, apps, strict=True) for name in api.all_names}

    def meant(name: str | None) -> ASGIApp | None:
        return known.get(name or "") or known.get((name or "").removesuffix(LATEST))

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        app = apps[0]
        if scope["type"] == "http":
            name, path = _in_query(scope), route_path(scope)
            if name is not None and meant(name) is None:  # most routes do not look at it, and would be another model's
                unknown = ModelNotFound(
                    f"the model {shortened(name)} does not exist; this server has: {', '.join(known)}.", param="model"
                )
                return await response_for(unknown, scope)(scope, receive, send)
            name = name or next((each for each in known if is_under(KSERVE + each, path)), None)
            if scope["method"] == "POST":
                first = await receive()
                named = await _in_body(first.get("body", b""), older=path == SHOWN)
                name, receive = named or name, replayed(first, receive)
            app = meant(name) or app
        await app(scope, receive, send)

    return run


def _in_query(scope: Scope) -> str | None:
    try:
        named = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=64).get("model")
    except ValueError:
        return None
    return named[-1] if named else None


async def _in_body(body: bytes, *, older: bool) -> str | None:
    """Return the model that a body names, with the older word if it has no other."""
    if body.lstrip()[:1] != b"{":
        return None

    def read() -> Any:
        try:
            found = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the route says what is wrong with it
        return found.model or (found.name if older else None)

    name = await off_loop(len(body), INLINE_BYTES, read)
    return name if isinstance(name, str) else None
