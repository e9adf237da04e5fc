"""Requests to a model that pools: admitted, sent to the engine, and what comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.request import BACKGROUND
from ridgeline.core.specs.pooling import PoolingParams, PoolingSpec
from ridgeline.serving import owner
from ridgeline.serving.errors import BadRequest, EngineFailed, TimedOut
from ridgeline.serving.generation.service import Service
from ridgeline.serving.generation.ticket import RequestTicket
from ridgeline.text.pooled import Encoded, finished, pooling_request

GENERATES = "this model generates; start the server with --runner pooling to embed or classify with it."


@dataclass(frozen=True, kw_only=True)
class PoolingAsked:
    """A checked request of a client. `timeout` bounds it in seconds, and `queue_timeout` its wait; 0 is no bound.
    `adapter` is the one that the client named as its model."""

    id: str
    prompt: Encoded
    params: PoolingParams
    priority: int = 0
    cache_salt: str = ""
    timeout: float = 0.0
    queue_timeout: float = 0.0
    adapter: UsedAdapter | None = None


@dataclass(frozen=True)
class PooledAnswer:
    """The vector of a prompt, or those of its tokens, finished."""

    vector: np.ndarray
    prompt_tokens: int
    cached_tokens: int


def pooling_facts(service: Service) -> PoolingSpec:
    """Return the form of the model's vectors. Raise BadRequest if it has none."""
    spec = service.facts().pooling
    if spec is None:
        raise BadRequest(GENERATES, param="model")
    return spec


async def run(service: Service, asked: PoolingAsked, index: int = 0) -> PooledAnswer:
    """Run a request to its end. Raise RequestFailed or InvalidRequest. If the task is cancelled, the request ends in
    the engine within a step."""
    spec, facts = pooling_facts(service), service.facts()
    ids = asked.prompt.ids
    priority = BACKGROUND if service.background else asked.priority
    request = pooling_request(
        asked.id, asked.prompt, asked.params, spec, priority=priority, cache_salt=asked.cache_salt
    )
    request = request if asked.adapter is None else asked.adapter.of(request)
    request = owner.apart(request) if service.keeps_apart else request
    whose = owner.current()
    service.admission.admit([request], facts, whose)
    ticket: RequestTicket | None = None
    try:
        ticket = await service.client.submit(request, None, name=asked.id, index=index)
        raw = await _vector(ticket, asked)
    finally:
        if ticket is not None and ticket.ended is None:
            service.client.cancel([ticket])
        service.admission.leave(1, request.cache_tokens, owner=whose)
    cached = ticket.ended.stats.cached_tokens if ticket.ended is not None else 0
    return PooledAnswer(finished(raw, asked.params, spec, ids), len(ids), cached)


async def _vector(ticket: RequestTicket, asked: PoolingAsked) -> np.ndarray:
    """Wait for the raw vector."""
    bound = min((each for each in (asked.timeout, asked.queue_timeout) if each > 0), default=None)
    started = time.monotonic()
    try:
        async with asyncio.timeout(bound):
            return await _read(ticket)
    except TimeoutError:
        waited = time.monotonic() - started
        raise TimedOut(f"the request took longer than {waited:.1f} s and was ended; try again later.") from None


async def _read(ticket: RequestTicket) -> np.ndarray:
    found: np.ndarray | None = None
    while True:
        while ticket.inbox:
            event = ticket.inbox.popleft()
            if isinstance(event, int):
                continue
            if event.error is not None:
                raise EngineFailed(event.error)
            if event.vector is not None:
                found = event.array
        if ticket.failure is not None:
            raise ticket.failure
        if ticket.ended is not None:
            if found is None:
                raise EngineFailed("the request ended without a vector.")
            return found
        waiter = asyncio.get_running_loop().create_future()
        ticket.watch(waiter)
        await waiter
