"""The requests under way on this API server's gRPC services, so that other calls can end them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from grpc.aio import ServicerContext as Context

from ridgeline.serving.apis.grpc.guard import key_in
from ridgeline.serving.generation.service import Run


class Running:
    """Runs by API key and request id, so that no client ends a request that came with another key. Ids may repeat,
    because clients choose them."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str | None, str], list[Run]] = {}

    @contextmanager
    def known(self, run: Run, context: Context) -> Iterator[None]:
        """Let `abort` find this run within the block."""
        name = key_in(context.invocation_metadata()), run.asked.id
        self._runs.setdefault(name, []).append(run)
        try:
            yield
        finally:
            self._runs[name].remove(run)
            if not self._runs[name]:
                del self._runs[name]

    def abort(self, request_id: str, context: Context) -> bool:
        """End the runs with this id. Return False if there is none."""
        found = self._runs.get((key_in(context.invocation_metadata()), request_id), [])
        for run in found:
            run.abort()
        return bool(found)
