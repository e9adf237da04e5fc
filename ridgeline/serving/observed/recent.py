"""The times of recent requests. The engine's process keeps them, so that all API servers report the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ridgeline.core.plan.request import RequestStats
from ridgeline.kernels.base.cost import Headroom
from ridgeline.transport.messages import Life, Look, Submit

KEPT = 4096  # completions

Figures = tuple[RequestStats, Headroom]


@dataclass(slots=True)
class _Completion:
    id: str  # the engine's id
    name: str
    index: int
    created: float
    reason: str | None = None
    figures: Figures | None = None  # known once it has ended


class RecentRequests:
    """The newest requests, running and ended, by name. Clients choose names, so a name may come again: the newest
    request has it."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, dict[int, _Completion]] = OrderedDict()  # by name, oldest first
        self._running: dict[str, _Completion] = {}
        self._kept = 0

    def begin(self, request_id: str, submit: Submit) -> None:
        """Note that the engine has taken this request on. `request_id` is the engine's name for it."""
        completion = _Completion(request_id, submit.name, submit.index, time.time())
        if submit.index in self._requests.get(submit.name, ()):
            self._forget(submit.name)
        self._requests.setdefault(submit.name, {})[submit.index] = self._running[request_id] = completion
        self._kept += 1
        while self._kept > KEPT and len(self._requests) > 1:
            self._forget(next(iter(self._requests)))

    def end(self, request_id: str, reason: str, stats: RequestStats, device: Headroom) -> None:
        if (completion := self._running.pop(request_id, None)) is not None:
            completion.reason, completion.figures = reason, (stats, device)

    def look(self, asked: Look, so_far: Callable[[str], Figures]) -> list[Life]:
        """Return the requests asked for. `so_far` returns the figures of a running one by the engine's id."""
        if asked.name is None:
            found = list(islice(reversed(self._requests.values()), asked.limit))
        else:
            found = [self._requests.get(asked.name, {})]
        return [_life(completion, so_far) for request in found for completion in request.values()]

    def _forget(self, name: str) -> None:
        for completion in self._requests.pop(name).values():
            self._kept -= 1
            self._running.pop(completion.id, None)


def _life(completion: _Completion, so_far: Callable[[str], Figures]) -> Life:
    stats, device = completion.figures or so_far(completion.id)
    return Life(
        name=completion.name,
        index=completion.index,
        created=completion.created,
        finish_reason=completion.reason,
        stats=stats,
        device=device,
    )
