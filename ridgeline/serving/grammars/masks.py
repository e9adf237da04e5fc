"""Grammars in the engine's process: compiled beside the steps, and asked for a mask at every token.

Legend:
    R  masks, a row for each
    W  words of 32 tokens
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ridgeline.core import token_bits
from ridgeline.core.request import TokenMask
from ridgeline.serving.grammars.fair import FairPool, Full, Job
from ridgeline.serving.grammars.grammar import compiled, wrong
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar, Submit

WORTH_THREADS = 4  # masks; fewer are found sooner than threads wake up
THREADS = 2  # for compiling, which releases the interpreter lock
PATIENCE = 4  # times the limit of a check, which this grammar has passed: if it takes that long, the machine is busy
KEPT = 64  # compiled grammars kept for further use
KEPT_CHARS = 4096  # longest text of a grammar that is kept; a larger one may take a hundred megabytes


class Busy(Exception):
    """Raised when there is no time for a grammar now. The grammar is not at fault."""


class GrammarMask:
    """The `DraftingMask` of a request: the tokens that keep its text within the grammar.

    The library finds these tokens and may take milliseconds for it, so `prepare` finds them for many requests at once,
    in the threads of `executor`. grammar: a matcher that has seen no token, of which this one has a copy.
    """

    walks = True

    def __init__(self, grammar: LLMatcher, vocab_size: int, executor: LLExecutor) -> None:
        self._grammar, self._matcher = grammar, grammar.deep_copy()
        self._vocab_size, self._executor = vocab_size, executor
        self._allowed_W: np.ndarray | None = None  # None until they are found
        self._taken: list[int] = []  # tokens that the matcher has seen

    @staticmethod
    def prepare(masks: Iterable[GrammarMask]) -> None:
        """Find the tokens that each of the masks allows."""
        asked = [mask for mask in masks if mask._allowed_W is None]
        if not asked:
            return
        bits_RW = np.zeros((len(asked), token_bits.num_words(asked[0]._vocab_size)), np.int32)
        matchers = [(mask._matcher, n) for n, mask in enumerate(asked)]
        if len(asked) < WORTH_THREADS:
            for matcher, n in matchers:
                fill_next_token_bitmask(matcher, bits_RW, n)
        else:
            fill_next_token_bitmask_par(asked[0]._executor, matchers, bits_RW)
        for mask, bits_W in zip(asked, bits_RW.view(np.uint32), strict=True):
            mask._allowed_W = bits_W

    def accept(self, token_id: int) -> None:
        self._allowed_W = None
        if self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token_id):
            raise wrong(self._matcher.get_error() or f"token {token_id} does not follow it")
        self._taken.append(token_id)

    def allowed(self) -> np.ndarray:
        self.prepare([self])
        if self._matcher.is_error():  # some limits of the library show only during generation
            raise wrong(self._matcher.get_error())
        assert self._allowed_W is not None
        return self._allowed_W

    def forced(self) -> list[int]:
        """Return the tokens in which a tokenizer would write the text that must come next."""
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def save(self) -> tuple[int, np.ndarray | None]:
        return len(self._taken), self._allowed_W

    def restore(self, state: object) -> None:
        taken, self._allowed_W = cast("tuple[int, np.ndarray | None]", state)
        back = len(self._taken) - taken
        del self._taken[taken:]
        if self._matcher.is_error() or not self._matcher.rollback(back):  # the library never leaves that state
            self._matcher = self._grammar.deep_copy()
            self._matcher.consume_tokens(self._taken)


class Waiting(NamedTuple):
    submit: Submit
    job: Job[LLMatcher]


class Grammars:
    """The compiler of grammars, off the engine's thread, for every client in turn.

    `done()` hands over the grammars that are ready and the errors of those that never will be. `timeout` is the time in
    seconds that an API server allowed for the same work.
    """

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
        """Compile the request's grammar, for `done` to hand over. Raise Busy if too much waits already."""
        assert submit.grammar is not None
        self._waiting[connection, submit.id] = Waiting(submit, self._job(connection, submit, submit.grammar))

    def cancel(self, connection: bytes, numbers: list[int]) -> list[int]:
        """Cancel these requests of an API server and return the numbers of those that were waiting here."""
        found = [number for number in numbers if (connection, number) in self._waiting]
        for number in found:
            del self._waiting[connection, number]
        self._drop_unwanted()
        return found

    def forget(self, connection: bytes) -> None:
        """Drop everything for an API server that is gone."""
        self.cancel(connection, [number for other, number in self._waiting if other == connection])

    def done(self) -> list[tuple[bytes, Submit, TokenMask | Exception]]:
        """Return what was decided since the last call."""
        found: list[tuple[bytes, Submit, TokenMask | Exception]] = []
        for (connection, number), waiting in list(self._waiting.items()):
            if (outcome := self._outcome(waiting)) is not None:
                found.append((connection, waiting.submit, outcome))
                del self._waiting[connection, number]
        if found:
            self._drop_unwanted()
        return found

    def _job(self, connection: bytes, submit: Submit, grammar: Grammar) -> Job[LLMatcher]:
        """Return the job that compiles a grammar. All completions of a request share one, and it is done already if the
        grammar was used lately."""
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
        return GrammarMask(matcher, self._vocab_size, self._executor)

    def _drop_unwanted(self) -> None:
        """Forget jobs that nobody waits for. Those that have not begun never will."""
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
