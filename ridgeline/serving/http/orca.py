"""The load of the engines in an answer's header, for load balancers that ask for it (ORCA, as vLLM has it).

endpoint-load-metrics-format: TEXT
endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=0.0
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.http.exchange import tell_ignored

ASKS, ANSWERS = "endpoint-load-metrics-format", "endpoint-load-metrics"
FORMS = ("TEXT", "JSON")
STRANGER = "stranger"  # in the state of a request without a key, on a route that is open although others ask for keys


def with_load(app: ASGIApp, api: ApiServer) -> ASGIApp:
    """Put the load into the answers to requests that ask for it. The figures are those that engines sent last, at most
    a second ago; without any there is no header, nor for a STRANGER."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        form = Headers(scope=scope).get(ASKS)
        if form is None:
            return await app(scope, receive, send)
        if form.upper() not in FORMS or scope.get("state", {}).get(STRANGER):
            tell_ignored(Request(scope), [ASKS])
            return await app(scope, receive, send)

        async def loaded(message: Message) -> None:
            if message["type"] == "http.response.start" and (told := written(form.upper(), load_of(api))):
                MutableHeaders(scope=message)[ANSWERS] = told
            await send(message)

        await app(scope, receive, loaded)

    return run


def load_of(api: ApiServer) -> dict[str, float]:
    """Return the load by vLLM's names: of several models the requests that wait for any, and the fullest cache."""
    known = [stats for each in api.beside if each.client.facts is not None and (stats := each.client.stats)]
    if not known:
        return {}
    used = max(stats.pages_used / max(stats.num_pages, 1) for stats in known)
    return {"kv_cache_usage_perc": used, "num_requests_waiting": float(sum(stats.waiting for stats in known))}


def written(form: str, load: dict[str, float]) -> str | None:
    """Return the header's value; None for a form that is not known, and for no figures."""
    if not load or form not in FORMS:
        return None
    if form == "JSON":
        return f"JSON {msgspec.json.encode({'named_metrics': load}).decode()}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
