"""Grammars in the engine's process: compiled next to the steps, and asked for a mask at every token."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ridgeline.core import token_bits
from ridgeline.core.request import TokenMask
from ridgeline.serving.grammars.fair import FairPool, Full, Job
from ridgeline.serving.grammars.grammar import compiled, wrong
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar, Submit

WORTH_THREADS = 4  # masks; fewer are found sooner than threads are woken
THREADS = 2  # of the compiler, which lets the interpreter go
PATIENCE = 4  # times the limit of a check, which this grammar has passed: if it takes so long the machine is busy
KEPT = 64  # compiled grammars that are used again
KEPT_CHARS = 4096  # of the text of one: larger ones may take a hundred megabytes


class Busy(Exception):
    """Not the grammar's fault: there is no time for it now."""


class GrammarMask:
    """A request's `TokenMask`: which tokens keep its text within the grammar.

    To find them is the library's work, and takes it up to milliseconds: `prepare` finds those of many requests at once,
    in the threads of `executor`.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, executor: LLExecutor) -> None:
        self._matcher, self._vocab_size, self._executor = matcher, vocab_size, executor
        self._allowed_W: np.ndarray | None = None  # None: to be found

    @staticmethod
    def prepare(masks: Iterable[GrammarMask]) -> None:
        """Find what each of them allows."""
        asked = [mask for mask in masks if mask._allowed_W is None]
        if not asked:
            return
        bits_NW = np.zeros((len(asked), token_bits.num_words(asked[0]._vocab_size)), np.int32)
        matchers = [(mask._matcher, n) for n, mask in enumerate(asked)]
        if len(asked) < WORTH_THREADS:
            for matcher, n in matchers:
                fill_next_token_bitmask(matcher, bits_NW, n)
        else:
            fill_next_token_bitmask_par(asked[0]._executor, matchers, bits_NW)
        for mask, bits_W in zip(asked, bits_NW.view(np.uint32), strict=True):
            mask._allowed_W = bits_W

    def accept(self, token_id: int) -> None:
        self._allowed_W = None
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            raise wrong(self._matcher.get_error() or f"token {token_id} does not follow it")

    def allowed(self) -> np.ndarray:
        self.prepare([self])
        if self._matcher.is_error():  # some limits of the library show only on the way
            raise wrong(self._matcher.get_error())
        assert self._allowed_W is not None
        return self._allowed_W


class Waiting(NamedTuple):
    submit: Submit
    job: Job[LLMatcher]


class Grammars:
    """Compiles off the engine's thread, for every client in turn. done() hands over what is ready, or why it never
    will be. timeout: seconds that an API server allowed for the same work."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: list[int], timeout: float) -> None:
        self._folder, self._vocab_size, self._eos_ids, self._timeout = folder, vocab_size, eos_ids, timeout
        self._pool = FairPool(THREADS, "grammar")
        self._executor = LLExecutor()
        self._waiting: dict[tuple[bytes, int], Waiting] = {}
        self._under_way: dict[tuple[str, Grammar], Job[LLMatcher]] = {}  # by owner
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def compile(self, connection: bytes, submit: Submit) -> None:
        """For `done` to hand over. Raises Busy."""
        assert submit.grammar is not None
        self._waiting[connection, submit.id] = Waiting(submit, self._job(connection, submit, submit.grammar))

    def cancel(self, connection: bytes, numbers: list[int]) -> list[int]:
        """Those of the numbers that were waiting here."""
        found = [number for number in numbers if (connection, number) in self._waiting]
        for number in found:
            del self._waiting[connection, number]
        self._drop_unwanted()
        return found

    def forget(self, connection: bytes) -> None:
        """Its API server is gone."""
        self.cancel(connection, [number for other, number in self._waiting if other == connection])

    def done(self) -> list[tuple[bytes, Submit, TokenMask | Exception]]:
        """Return what is decided since the last call."""
        found: list[tuple[bytes, Submit, TokenMask | Exception]] = []
        for (connection, number), waiting in list(self._waiting.items()):
            if (outcome := self._outcome(waiting)) is not None:
                found.append((connection, waiting.submit, outcome))
                del self._waiting[connection, number]
        if found:
            self._drop_unwanted()
        return found

    def _job(self, connection: bytes, submit: Submit, grammar: Grammar) -> Job[LLMatcher]:
        """One for all completions of a request, and done already where the grammar was used lately."""
        owner = f"{connection.hex()} {submit.owner}"
        job = self._under_way.get((owner, grammar))
        if job is not None:
            return job
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            job = Job(owner, lambda: self._kept[grammar])
            job.run()
            return job
        try:
            job = self._under_way[owner, grammar] = self._pool.submit(owner, lambda: self._matcher(grammar))
        except Full:
            raise Busy("too many grammars wait to be compiled; try again later.") from None
        return job

    def _outcome(self, waiting: Waiting) -> TokenMask | Exception | None:
        job, grammar = waiting.job, waiting.submit.grammar
        if not job.future.done():
            late = time.monotonic() - job.queued > PATIENCE * self._timeout
            return Busy("there was no time to compile the grammar; try again later.") if late else None
        error = job.future.exception()
        if error is not None:
            return error if isinstance(error, Exception) else RuntimeError(str(error))
        matcher = job.future.result()
        if grammar is not None and len(grammar.text) <= KEPT_CHARS and grammar not in self._kept:
            self._kept[grammar] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return GrammarMask(matcher.deep_copy(), self._vocab_size, self._executor)

    def _drop_unwanted(self) -> None:
        """Forget what nobody waits for; what has not begun never will."""
        wanted = {id(waiting.job) for waiting in self._waiting.values()}
        for key, job in list(self._under_way.items()):
            if id(job) not in wanted:
                job.future.cancel()
                del self._under_way[key]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            Tokenizer.from_folder(self._folder).backend.to_str(), self._vocab_size, self._eos_ids or None
        )

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, compiled(grammar), log_level=0)
        if matcher.is_error():
            raise wrong(matcher.get_error())
        return matcher
