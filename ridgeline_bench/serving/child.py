"""A client process: `python -m ridgeline_bench.serving.child` reads a `Task` from standard input and writes lines of
JSON.

The first is `ready`, when its requests are prepared. After reading the moment of the start it writes how many requests
have ended, and last a `Share`. Moments are on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ridgeline_bench.serving.client import Address, Answer, Client, Disconnected
from ridgeline_bench.serving.outcome import Outcome, Share
from ridgeline_bench.serving.stream import Stream
from ridgeline_bench.serving.work import Request, Work

PERIOD = 0.25  # seconds between reports of progress
NO_ANSWER = Answer(0, b"")


class Task(msgspec.Struct, kw_only=True):
    """The task of one client process.

    `rate`, `point` and `share` are those of `Work.requests`. `body` holds the fields of every request; None removes one
    that we would send. `max_concurrency` is this process's (0: any). `timeout` is the seconds a request may take.
    `until` is the moment at which requests that are still open are given up.
    """

    url: str
    headers: dict[str, str]
    work: Work
    rate: float
    point: str
    share: tuple[int, int]
    body: dict[str, Any]
    max_concurrency: int = 0
    timeout: float = 600.0
    until: float = math.inf


class Load:
    """A share of the requests, each sent at its time."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._client = Client(Address.of(task.url), task.headers)
        self._work = [(r, self._encode(r)) for r in task.work.requests(task.rate, task.point, task.share)]
        self._places = asyncio.Semaphore(task.max_concurrency) if task.max_concurrency else None
        self.outcomes: list[Outcome] = []

    def __len__(self) -> int:
        return len(self._work)

    def _encode(self, request: Request) -> bytes:
        work, fields = self._task.work, dict(self._task.body)
        if work.text:
            route = f"/v2/models/{fields.pop('model')}/generate_stream"
        else:
            route = "/v1/chat/completions" if work.chat else "/v1/completions"
        body = {
            "text_input" if work.text else "messages" if work.chat else "prompt": request.prompt,
            "max_completion_tokens" if work.chat else "max_tokens": request.max_tokens,
            **fields,
        }
        kept = {name: value for name, value in body.items() if value is not None}
        return self._client.encode(route, msgspec.json.encode(kept))

    async def run(self, start: float) -> None:
        """Send the requests. Arrivals count from the moment `start` of the monotonic clock."""
        async with asyncio.TaskGroup() as running:
            for request, body in self._work:
                if (wait := start + request.at - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                running.create_task(self._one(request, body, start))
        self._client.close()

    async def _one(self, request: Request, body: bytes, start: float) -> None:
        due = free = start + request.at
        if self._places is not None:
            waits = self._places.locked()
            await self._places.acquire()
            free = time.monotonic() if waits else due
        sent = time.monotonic()
        limits = sent + self._task.timeout, self._task.until
        done = await exchange(self._client, body, limits, marked=not self._task.work.text)
        if self._places is not None:
            self._places.release()
        self.outcomes.append(outcome_of(request, done, SendMoments(start, due, sent, self._task.body), free))


class SentExchange(NamedTuple):
    """A request's answer, its stream, and the moment at which both were there. error: the kind of failure and its
    words, or two empty strings."""

    answer: Answer
    stream: Stream
    end: float
    error: tuple[str, str]


class SendMoments(NamedTuple):
    """The moments of a request, on the monotonic clock: the start of all, when it was to leave, and when it left. body:
    its fields."""

    start: float
    due: float
    sent: float
    body: Mapping[str, Any]


async def exchange(client: Client, body: bytes, limits: tuple[float, float], *, marked: bool = True) -> SentExchange:
    """Send a request and take its stream. limits: the moments at which its time is up, and that of all requests.
    marked: as in `Stream`."""
    stream, error, message, answer = Stream(marked=marked), "", "", NO_ANSWER
    sent = time.monotonic()
    try:
        async with asyncio.timeout(min(limits) - sent):
            answer = await client.send(body, stream.feed)
    except TimeoutError:
        error = "timeout" if limits[0] <= limits[1] else "out of time"
        message = f"no end after {time.monotonic() - sent:.3g} s"
    except Disconnected as failure:
        if stream.failure is not None:  # the stream gave its reason before it ended
            error, message = stream.failure.kind, str(stream.failure)
        elif not stream.ended:
            error, message = "disconnected", str(failure)
        answer = Answer(200, b"")
    except OSError as failure:
        error, message = "no connection", str(failure)
    return SentExchange(answer, stream, time.monotonic(), (error, message))


def outcome_of(request: Request, done: SentExchange, asked: SendMoments, free: float | None = None) -> Outcome:
    """Return the outcome of a request. free: when there was a place for it, if places are few."""
    answer, stream, start = done.answer, done.stream, asked.start
    error, message = done.error if done.error[0] else _judge(answer, stream, asked.body, request)
    return Outcome(
        index=request.index,
        due=asked.due - start,
        free=(asked.due if free is None else free) - start,
        sent=asked.sent - start,
        end=done.end - start,
        asked_tokens=request.max_tokens,
        moments=[at - start for at in stream.moments],
        counts=stream.counts,
        prompt_tokens=stream.prompt_tokens or request.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        output_tokens=stream.output_tokens,
        exact=stream.exact,
        error=error,
        message=message[:300],
    )


def _judge(answer: Answer, stream: Stream, body: Mapping[str, Any], request: Request) -> tuple[str, str]:
    """Return the fault of an answer that arrived whole: kind and words, or two empty strings."""
    if answer.status != 200:
        return f"HTTP {answer.status}", answer.body.decode(errors="replace")
    if stream.failure is not None:
        return stream.failure.kind, str(stream.failure)
    if not stream.ended:
        return "cut short", "the answer ended without [DONE]"
    if not stream.moments:
        return "empty", "the answer has no tokens"
    if body.get("ignore_eos") and stream.exact and stream.output_tokens != request.max_tokens:
        return "wrong length", f"{stream.output_tokens} tokens instead of {request.max_tokens}"
    return "", ""


async def _report(load: Load) -> None:
    while True:
        await asyncio.sleep(PERIOD)
        _say(len(load.outcomes))


async def _run(task: Task) -> Share:
    load = Load(task)
    gc.collect()
    gc.disable()  # a collection would be measured as the server's pause
    _say("ready")
    start = float(sys.stdin.readline())
    reporter, worked = asyncio.create_task(_report(load)), time.process_time()
    began = time.monotonic()
    await load.run(start)
    busy = (time.process_time() - worked) / max(1e-9, time.monotonic() - began)
    reporter.cancel()
    return Share(outcomes=load.outcomes, busy=busy)


def _say(what: Any) -> None:
    left = memoryview(msgspec.json.encode(what) + b"\n")
    while left:  # a pipe may take less than all, and sys.stdout handles that only if Python buffers it
        left = left[os.write(1, left) :]


def main() -> None:
    task = msgspec.convert(json.loads(sys.stdin.readline()), Task)  # not msgspec's JSON, which has no infinity
    try:
        import uvloop
    except ImportError:
        share = asyncio.run(_run(task))
    else:
        share = uvloop.run(_run(task))
    _say(share)


if __name__ == "__main__":
    main()
