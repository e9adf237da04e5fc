"""Counts and durations of a model's inferences for KServe's clients, as Triton's extension for statistics has them.

    with inferences.of(model.name) as inference:
        …                                    # the input is read
        inference.run = run                  # or inference.computes()
        with inference.response(): …         # a part of a stream is sent

A request's time is its input's preparation, the wait until the engine first scheduled it, the model's work, and the
rest, in which the output is made.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ridgeline.serving.generation.service import Run
from ridgeline.serving.repository.models import ServedModel

MOST_RESPONSES = 1024  # responses of a stream that are reported one by one
_ENDS = ("success", "fail")
_IN_ORDER = ("compute_input", "queue", "compute_infer", "compute_output")  # these follow each other
_CACHE = ("cache_hit", "cache_miss")  # Triton's cache of responses, which is not here
_OF_RESPONSES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


@dataclass
class Spent:
    """A count of something that happened, and the nanoseconds that it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count, self.ns = self.count + 1, self.ns + max(0, round(seconds * 1e9))

    def json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


def _table() -> defaultdict[str, Spent]:
    return defaultdict(Spent)


@dataclass
class _Counted:
    """The figures of one model. `last` is the time of the last request, in milliseconds since 1970."""

    last: int = 0
    spent: defaultdict[str, Spent] = field(default_factory=_table)
    responses: list[defaultdict[str, Spent]] = field(default_factory=list)


class Inference:
    """One request under way. `run` is that of the engine, where a model generates."""

    def __init__(self, counted: _Counted) -> None:
        self.run: Run | None = None
        self._counted = counted
        self._begun = self._marked = time.monotonic()
        self._computing: float | None = None
        self._sent = 0

    def computes(self) -> None:
        """Tell that the input is read, and that the model works from now on."""
        self._computing = time.monotonic()

    @contextmanager
    def response(self, *, empty: bool = False) -> Iterator[None]:
        """Count a response that is sent in this block. An `empty` one only says that there are no more."""
        begun, end = time.monotonic(), "empty_response" if empty else "success"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            end = "cancel"
            raise
        except BaseException:
            end = "fail"
            raise
        finally:
            made, self._marked = begun - self._marked, time.monotonic()
            if self._sent < MOST_RESPONSES:
                if self._sent == len(self._counted.responses):
                    self._counted.responses.append(_table())
                spent = self._counted.responses[self._sent]
                spent[end].add(made + self._marked - begun)
                if end == "success":
                    spent["compute_infer"].add(made)
                    spent["compute_output"].add(self._marked - begun)
            self._sent += 1

    def end(self, *, failed: bool) -> None:
        now, spent = time.monotonic(), self._counted.spent
        spent["fail" if failed else "success"].add(now - self._begun)
        if failed:
            return
        moments = [self._begun]
        for moment in (*self._moments(now), now):  # two processes' clocks: none goes back
            moments.append(min(max(moment, moments[-1]), now))
        for name, begun, ended in zip(_IN_ORDER, moments[:-1], moments[1:], strict=True):
            spent[name].add(ended - begun)

    def _moments(self, now: float) -> tuple[float, float, float]:
        """Return the times at which the request was submitted, first scheduled and done."""
        if self.run is None:
            begun = self._begun if self._computing is None else self._computing
            return begun, begun, now
        submitted, stats = self.run.arrived, [ended.stats for ended in self.run.endings if ended is not None]
        scheduled = [each.first_scheduled for each in stats if each.first_scheduled is not None]
        return submitted, min(scheduled, default=submitted), max((each.finished for each in stats), default=now)


class Inferences:
    """The figures of all models of an API server, by the names that requests call them."""

    def __init__(self) -> None:
        self._counted: defaultdict[str, _Counted] = defaultdict(_Counted)

    @contextmanager
    def of(self, model: str) -> Iterator[Inference]:
        """Count a request to a model, which runs in this block."""
        counted = self._counted[model]
        counted.last = int(time.time() * 1000)
        inference, failed = Inference(counted), True
        try:
            yield inference
            failed = False
        finally:
            inference.end(failed=failed)

    def told(self, model: ServedModel) -> dict[str, Any]:
        """Return the figures of a model in the protocol's names. One request runs as one batch of 1."""
        counted = self._counted.get(model.name) or _Counted()
        spent, count = counted.spent, counted.spent["success"].count
        batch = {"batch_size": 1} | {name: spent[name].json() for name in _IN_ORDER if name != "queue"}
        return {
            "name": model.name,
            "version": model.version,
            "last_inference": counted.last,
            "inference_count": count,
            "execution_count": count,
            "inference_stats": {name: spent[name].json() for name in (*_ENDS, *_IN_ORDER)}
            | {name: Spent().json() for name in _CACHE},
            "response_stats": {
                str(index): {name: each[name].json() for name in _OF_RESPONSES}
                for index, each in enumerate(counted.responses)
            },
            "batch_stats": [batch] if count else [],
        }
