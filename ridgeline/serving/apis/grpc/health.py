"""The service grpc.health.v1: the API server's own health at the moment of asking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from grpc.aio import ServicerContext as Context
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse as Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import Overloaded, RequestFailed

PERIOD = 0.2  # seconds between looks on behalf of watching clients
MOST_WATCHERS = 1000  # at once; they need no key


class UnknownService(RequestFailed):
    status, kind = 404, "invalid_request_error"


def ready(api: ApiServer) -> bool:
    """Return True if requests may come."""
    return api.unready is None


class Health(health_pb2_grpc.HealthServicer):
    """The health service. `services` are the names it knows; "" is the server as a whole."""

    def __init__(self, api: ApiServer, services: Sequence[str]) -> None:
        self._api, self._services = api, {"", *services}
        self._watchers = 0

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Response:
        if request.service not in self._services:
            raise UnknownService(f"there is no service {request.service!r}; reflection lists those there are.")
        return Response(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: Response(status=self._status(name)) for name in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[Response]:
        """Yield every change of health. The stream ends when the server drains, so as not to hold it up."""
        if self._watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} clients watch the server's health already; use Check.", retry_after=5)
        self._watchers += 1
        last = None
        try:
            while True:
                status = self._status(request.service)
                if status != last:
                    yield Response(status=status)
                if self._api.service.admission.draining:
                    return
                last = status
                await asyncio.sleep(PERIOD)
        finally:
            self._watchers -= 1

    def _status(self, service: str) -> int:
        if service not in self._services:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if ready(self._api) else Response.NOT_SERVING
