"""Routes for the server's operator: metrics, the parts of requests' times, and the dashboard.

The dashboard is files beside `observed/dashboard/page.html`; it asks for /dashboard/data once a second, and gets the
last hour too when it has just been opened. All of these routes are behind keys where keys are set (http/middleware.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from msgspec.structs import asdict

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, Unavailable
from ridgeline.serving.http.answers import Forgotten, ServerInfo
from ridgeline.serving.http.describe import answers as answered
from ridgeline.serving.observed import metrics, past
from ridgeline.serving.observed.breakdown import breakdowns
from ridgeline.serving.observed.expert_figures import shown
from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.serving.observed.recent import KEPT
from ridgeline.transport.messages import EngineFacts, Stats
from ridgeline.version import __version__

PAGE = "page.html"
SCRIPT, STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
ASSETS = {"page.js": SCRIPT, "uplot.js": SCRIPT, "page.css": STYLE, "uplot.css": STYLE}
SHOWN_REQUESTS = 12
SHOWN_FIGURES = (
    *("at", "started", "running", "waiting", "pages_used", "num_pages", "step_seconds", "limit_seconds", "counters"),
    "finished",
)
SAME = 0.01  # seconds that the starts of one engine may differ by: the past has them in ms
HOLE = 3 * past.PERIOD  # seconds without figures at a page, from which on it gets the past ones
SECRET = ("api_key", "trusted_key", "admin_key", "ssl_keyfile_password")
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (  # nothing from elsewhere, and no frames
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RequestNotFound(BadRequest):
    status, code = 404, "request_not_found"


def router(api: ApiServer) -> APIRouter:
    """Return the routes GET /metrics, /v1/requests, /v1/requests/{id}, /kv, /server_info, /dashboard and what that page
    needs, and POST /reset_prefix_cache."""
    routes = APIRouter(tags=["operator"])

    @routes.get("/metrics", summary="Prometheus' text format", response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        return Response(await page_of_metrics(api), headers={"Content-Type": metrics.CONTENT_TYPE})

    @routes.get("/v1/requests", summary="The newest requests, and where their time went")
    async def requests(limit: str = "100") -> dict[str, Any]:
        return {"object": "list", "data": breakdowns(await api.client.look(limit=_limit(limit)))}

    @routes.get("/v1/requests/{request_id}", summary="Where one request's time went")
    async def request(request_id: str) -> dict[str, Any]:
        found = breakdowns(await api.client.look(request_id))
        if not found:
            raise RequestNotFound(
                f"no request {request_id[:128]!r} is known; the newest {KEPT} that the engine ran are.",
                param="request_id",
            )
        return found[0]

    @routes.get("/kv", summary="The KV cache: blocks, prefix tree, owners, hits and waste")
    async def kv() -> dict[str, Any]:
        return {"caches": [dataclasses.asdict(cache) for cache in await api.client.census()]}

    @routes.get("/server_info", summary="The server's settings, and what its engine is", responses=answered(ServerInfo))
    async def server_info() -> dict[str, Any]:
        return info(api)

    @routes.post(
        "/reset_prefix_cache",
        summary="Let no later request find anything in the prefix cache",
        responses=answered(Forgotten, 403),
    )
    async def reset_prefix_cache() -> dict[str, str]:
        await api.client.forget()
        return {"status": "ok"}

    @routes.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        return _file(PAGE, "text/html; charset=utf-8")

    @routes.get("/dashboard/data", include_in_schema=False)
    async def data(started: float = 0.0, since: float = 0.0) -> Response:
        content = msgspec.json.encode(await figures(api, started, since))
        return Response(content, headers={"Cache-Control": "no-store", "Content-Type": "application/json"})

    for name, kind in ASSETS.items():
        routes.add_api_route(f"/dashboard/{name}", _serve(name, kind), include_in_schema=False)
    return routes


async def page_of_metrics(api: ApiServer) -> bytes:
    """Return the text of /metrics, with the figures of now or, if the engine does not answer, the last ones known."""
    told = await asyncio.gather(*(each.client.ask_each() for each in api.beside))
    pages = [
        snapshot(each, stats, index)
        for each, figures in zip(api.beside, told, strict=True)
        for index, stats in enumerate(figures)
    ]
    return metrics.render(*pages)


def info(api: ApiServer) -> dict[str, Any]:
    """Return the settings without what is secret, and the facts that the engine told."""
    config = {name: value for name, value in dataclasses.asdict(api.config).items() if name not in SECRET}
    facts = api.client.known
    told = (
        None if facts is None else {name: getattr(facts, name) for name in facts.__struct_fields__ if name != "pooling"}
    )
    found = {"version": __version__, "names": list(api.names), "config": config, "engine": told}
    return {**found, "vllm_config": None if facts is None else _vllm_config(api, facts)}


def _vllm_config(api: ApiServer, facts: EngineFacts) -> dict[str, Any]:
    """Return the settings that trainers read, under vLLM's names."""
    backend = "gloo" if facts.device == "cpu" else "nccl"
    return {
        "model_config": {"model": api.names[0], "dtype": f"torch.{facts.dtype}", "max_model_len": facts.max_model_len},
        "parallel_config": {"world_size": facts.ranks, "data_parallel_size": len(api.client.engines)},
        "weight_transfer_config": {"backend": backend} if api.config.weight_transfer else None,
    }


def snapshot(api: ApiServer, stats: Stats | None, engine: int = 0) -> metrics.Snapshot:
    """Return everything about one engine that a page of metrics shows."""
    client, admission = api.client.engines[engine], api.service.admission
    return metrics.Snapshot(
        engine=engine,
        model=api.names[0],
        up=client.facts is not None,
        restarts=client.known.life - 1 if client.known is not None else 0,
        facts=client.known,
        stats=stats,
        name=client.name,
        api_servers=api.config.api_server_count,
        open_requests=admission.open_requests,
        open_tokens=admission.open_tokens,
        rejected={
            "max_num_queued_reqs": admission.rejected_requests,
            "max_num_queued_tokens": admission.rejected_tokens,
        },
        stalls=api.watchdog.stalls,
        stall_seconds=api.watchdog.seconds,
        price_per_hour=api.config.price_per_hour,
        now=time.time(),
    )


async def figures(api: ApiServer, started: float, since: float) -> dict[str, Any]:
    """Return the figures that the dashboard shows.

    Steps are those after `since`, a time of the engine that started at `started`. `requests` is None if the engine does
    not report them now, and `past` if the page knows it.
    """
    client = api.client
    facts, stats = client.known, client.stats
    try:
        requests = breakdowns(await client.look(limit=SHOWN_REQUESTS))
    except Unavailable:
        requests = None
    return {
        "version": __version__,
        "model": api.names[0],
        "up": client.facts is not None,
        "healthy": api.healthy,
        "draining": api.service.admission.draining,
        **{name: getattr(facts, name, None) for name in ("device", "dtype", "block_size")},
        "requests": requests,
        "past": await _past(api, since, stats),
        "figures": _of_engines(stats, started, since) if stats is not None else None,
    }


async def _past(api: ApiServer, since: float, stats: Stats | None) -> msgspec.Raw | None:
    """Return the figures between `since` and the newest, if a page missed some."""
    if since and (stats is None or stats.at - since < HOLE):
        return None

    def read() -> msgspec.Raw:
        pasts = [past.Past(engine.path).read() for engine in api.client.engines]
        return msgspec.Raw(msgspec.json.encode(past.told(pasts, since)))

    return await asyncio.to_thread(read)


def _of_engines(stats: Stats, started: float, since: float) -> dict[str, Any]:
    after = since if abs(started - stats.started) < SAME else 0.0
    told: dict[str, Any] = {name: getattr(stats, name) for name in SHOWN_FIGURES}
    told["bounds"] = {name: BOUNDS[name] for name in past.HISTOGRAMS}
    told["histograms"] = {name: stats.histograms[name].counts for name in past.HISTOGRAMS}
    told["steps"] = [
        [step.at, step.seconds, step.limit, step.decode_rows, step.prefill_rows, step.tokens]
        for step in stats.recent
        if step.at > after
    ]
    told["gpus"] = [{name: value for name, value in asdict(gpu).items() if name != "name"} for gpu in stats.gpus]
    told["experts"] = None if stats.experts is None else shown(stats.experts)
    return told


def _limit(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= KEPT):
        raise BadRequest(f"limit must be a whole number from 1 to {KEPT}, got {text[:32]!r}.", param="limit")
    return int(text)


def _serve(name: str, kind: str) -> Any:
    async def serve() -> Response:
        return _file(name, kind)

    return serve


def _file(name: str, kind: str) -> Response:
    content = files("ridgeline.serving.observed").joinpath("dashboard", name).read_bytes()
    return Response(content, headers={**HEADERS, "Content-Type": kind})
