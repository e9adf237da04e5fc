"""Checks of grammars by an API server: each grammar is compiled once before its request is accepted, and put into words
that the engine can use.

A grammar is foreign code, so it is compiled in a child process with limits (core/confined.py).
Clients take turns there. Only the time that the grammar itself takes counts against it; if it had to wait for too long,
the client gets the error of a busy server.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from ridgeline.core.confined import Confined, OverLimit
from ridgeline.core.errors import InvalidRequest
from ridgeline.serving import owner
from ridgeline.serving.errors import GrammarsBusy
from ridgeline.serving.grammars.fair import FairPool, Full, Job
from ridgeline.transport.messages import Grammar

PROCESSES = 2
MEMORY = 256 << 20  # bytes
PATIENCE = 2  # times the limit of one check: how long a grammar may wait for its turn
KEPT = 512  # verdicts
KEPT_CHARS = 16_384  # longest grammar whose verdict is kept
RETRY_AFTER = 2  # seconds


class Verdict(NamedTuple):
    """Why a grammar cannot be used; or None, and the grammar in words that can."""

    reason: str | None
    usable: Grammar


class GrammarChecks:
    """The grammars that an API server has checked or is checking.

    `seconds` is the time that compiling a grammar may take. `named` holds the model's tokens that a grammar may call by
    name, and `size` is the number of tokens in the vocabulary.
    """

    def __init__(self, seconds: float, named: Mapping[str, int] | None = None, size: int = 0) -> None:
        self._seconds, self._named, self._size = seconds, dict(named or {}), size
        self._compile = Confined(
            "ridgeline.serving.grammars.grammar:checker", seconds=seconds, memory=MEMORY, most=PROCESSES
        )
        self._pool = FairPool(PROCESSES, "grammar-check")
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._under_way: dict[tuple[str, Grammar], Job[dict[str, Any]]] = {}

    async def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar in words that the engine can use. Raise InvalidRequest with the reason if there are none,
        and GrammarsBusy if it must wait too long."""
        if grammar in self._verdicts:
            self._verdicts.move_to_end(grammar)
            verdict = self._verdicts[grammar]
        else:
            verdict = await self._verdict(owner.current(), grammar)
        if verdict.reason is not None:
            raise InvalidRequest(verdict.reason, param="structured_outputs")
        return verdict.usable

    async def _verdict(self, client: str, grammar: Grammar) -> Verdict:
        """Return the verdict on a grammar. Equal questions of a client wait for one answer."""
        key = client, grammar
        job = self._under_way.get(key)
        if job is None:
            try:
                job = self._pool.submit(client, lambda: self._compile(self._asked(grammar)))
            except Full:
                raise GrammarsBusy("too many grammars wait to be checked; try again later.", RETRY_AFTER) from None
            self._under_way[key] = job
            job.future.add_done_callback(self._forgetting(key, asyncio.get_running_loop()))
        try:
            told = await self._result(job)
        except OverLimit as limit:  # not kept: the machine may have been at fault
            return Verdict(f"the grammar is too complex: {limit} to compile; make it simpler.", grammar)
        kind = "grammar" if grammar.kind == "quoted" else grammar.kind
        verdict = Verdict(told["reason"], Grammar(kind=kind, text=told["text"]))
        if max(len(grammar.text), len(told["text"])) <= KEPT_CHARS:
            self._verdicts[grammar] = verdict
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return verdict

    def _asked(self, grammar: Grammar) -> dict[str, Any]:
        """Return the question for the child process. The model's vocabulary goes along only if the grammar may name its
        tokens, as in `<tool_call>` or `<[151657]>`."""
        speaks = grammar.kind == "grammar" and "<" in grammar.text
        named = {name: number for name, number in self._named.items() if speaks and name in grammar.text}
        return {
            "kind": grammar.kind,
            "text": grammar.text,
            "named": named,
            "size": self._size if speaks else 0,
        }

    async def _result(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        """Return the job's result as soon as it is there. Others may wait for the same job, whose process bounds its
        time."""
        waited = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait([waited], timeout=PATIENCE * self._seconds)
            if job.started is None:
                job.future.cancel()
            return await asyncio.shield(waited)
        except asyncio.CancelledError:
            if not job.future.cancelled():
                raise
            raise GrammarsBusy("there was no time to check the grammar; try again later.", RETRY_AFTER) from None

    def _forgetting(
        self, key: tuple[str, Grammar], loop: asyncio.AbstractEventLoop
    ) -> Callable[[Future[dict[str, Any]]], object]:
        return lambda _: loop.call_soon_threadsafe(self._under_way.pop, key, None)
