"""A session: one server under one sort of work, at one rate after another."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.serving.child import Task
from ridgeline_bench.serving.figures import Point, Slo, point, rate_name
from ridgeline_bench.serving.run import run
from ridgeline_bench.serving.search import Search
from ridgeline_bench.serving.server import Server
from ridgeline_bench.serving.trace import timed
from ridgeline_bench.serving.work import Work

# With these an answer's pieces can be counted in tokens. Ridgeline and vLLM know both fields.
STREAMING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

OnProgress = Callable[[str, int, int], None]  # told a rate's name, its requests, and how many of them have ended


def parse_rates(text: str, work: Work) -> list[float]:
    """Return the rates of "1,2,4" or "inf". An empty text is a trace's own times (0), else all at once. Raise
    InvalidConfig."""
    if not text and work.trace and timed(work.trace):
        return [0.0]
    try:
        rates = [float(part) for part in (text or "inf").split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise InvalidConfig(f"--rate must be requests a second above 0, or inf; several with commas; got {text!r}.")
    if any(map(math.isinf, rates)) and not (work.count or work.trace):
        raise InvalidConfig("an infinite --rate has no end; say how many with --num-requests.")
    return rates


@dataclass(frozen=True, kw_only=True)
class Sending:
    """The way to send requests to any server.

    rates: requests a second, one after another. fields: go into every request's body.
    max_concurrency: requests open at once; 0: as many as there are. timeout: seconds that a request may take.
    processes: that send. search: look for the highest rate that meets an objective, from the first of `rates` on.
    """

    rates: Sequence[float]
    slo: Slo
    fields: Mapping[str, Any]
    api_key: str = ""
    max_concurrency: int = 0
    timeout: float
    processes: int = 1
    search: Search | None = None


@dataclass(frozen=True)
class Session:
    """A session. `server` is measured, and `task` is the task of each process, except the rate."""

    server: Server
    task: Task
    sending: Sending

    @classmethod
    def begin(cls, url: str, model: str, work: Work, sending: Sending, until: float = math.inf) -> Session:
        """Ask the server what it serves, and check that the work suits it. `until` is the monotonic moment at which
        everything must be over."""
        headers = {"Authorization": f"Bearer {sending.api_key}"} if sending.api_key else {}
        server = Server.ask(url, headers, model, kserve=work.text)
        work = replace(work, vocab_size=work.vocab_size or server.vocab_size)
        _check(work, server)
        task = Task(
            url=server.url,
            headers=headers,
            work=work,
            rate=math.inf,
            point="",
            share=(0, 1),
            body={"model": server.model, **({"stream": True} if work.text else STREAMING), **sending.fields},
            max_concurrency=sending.max_concurrency,
            timeout=sending.timeout,
            until=until,
        )
        return cls(server, task, sending)

    def warm_up(self, count: int) -> None:
        """Send one request after another, with prompts unlike any that are measured. Raise InvalidConfig if none of
        them is answered, because nothing else would be."""
        if not count:
            return
        work = replace(self.task.work, count=count, duration=0.0)
        done = run(self._at(math.inf, "warm up", work=work, max_concurrency=1), 1).outcomes
        if all(o.error for o in done):
            raise InvalidConfig(f"{self.server.url} answers no request: {done[0].error} ({done[0].message}).")

    def measure(self, on_progress: OnProgress = lambda name, total, ended: None) -> Iterator[Point]:
        """Yield a point per rate, in turn or as a search finds them, until the time is up."""
        numbers = itertools.count()
        measure = lambda rate: self._point(rate, f"point {next(numbers)}", on_progress)  # noqa: E731
        if self.sending.search is not None:
            yield from self.sending.search.points(self.sending.rates[0], measure)
            return
        for rate in self.sending.rates:
            if (found := measure(rate)) is None:
                return
            yield found

    def _point(self, rate: float, name: str, on_progress: OnProgress) -> Point | None:
        """Return the figures of a rate, or None if its requests could not all leave until the time is up: it is not
        begun then. `name` is that of its prompts."""
        shown, arrivals = rate_name(rate), self.task.work.arrivals(rate)
        if not arrivals and self.sending.search is not None:
            return None  # a search that has come so low has found that no rate meets the objective
        if not arrivals:
            raise InvalidConfig(f"at {shown} no request leaves within --duration; make it longer.")
        if time.monotonic() + arrivals[-1] >= self.task.until:
            return None
        done = run(self._at(rate, name), self.sending.processes, partial(on_progress, shown, len(arrivals)))
        return point(rate, done, self.sending.slo)

    def _at(self, rate: float, name: str, **changes: Any) -> Task:
        return msgspec.structs.replace(self.task, rate=rate, point=name, **changes)


def _check(work: Work, server: Server) -> None:
    needs_ids = not (work.chat or work.text) and not all("prompt" in row for row in work.trace or ({},))
    if needs_ids and not work.vocab_size:
        raise InvalidConfig(f"{server.url} does not say how large its vocabulary is; give --vocab-size.")
    if work.burstiness <= 0:
        raise InvalidConfig(f"--burstiness must be above 0, got {work.burstiness!r}.")
    if server.max_model_len and (longest := work.longest()) > server.max_model_len:
        raise InvalidConfig(
            f"the longest request needs {longest} tokens and the model's context has {server.max_model_len}; shorten "
            "--input-len, --output-len or --shared-prefix (a lognormal's third number is its longest)."
        )
