"""Grammars in the engine's process: compiled beside the steps, and asked for a mask at every token.

Legend:
    R  masks, a row for each
    W  words of 32 tokens
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ridgeline.core.plan import token_bits
from ridgeline.core.plan.request import TokenMask
from ridgeline.serving.grammars import grammar as grammars
from ridgeline.serving.grammars.fair import FairPool, Full, Job
from ridgeline.serving.grammars.grammar import wrong
from ridgeline.serving.grammars.kept import Compiled, Kept
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar, Submit

WORTH_THREADS = 4  # masks; fewer are found sooner than threads wake up
THREADS = 2  # for compiling, which releases the interpreter lock
PATIENCE = 4  # times the limit of a check, which this grammar has passed: if it takes that long, the machine is busy
SLOW = 0.005  # seconds of the processor; a mask that takes longer is found by itself, so that its time is known
SLOW_TOGETHER = 0.04  # seconds of the processor that slow masks of one step may take
NOTED = 16  # tokens between looks at a grammar's memory
MOST_SPELLINGS = 64  # ways to go on with a text that is the only one


class Busy(Exception):
    """Raised when there is no time for a grammar now. The grammar is not at fault."""


class GrammarMask:
    """The `DraftingMask` of a request: the tokens that keep its text within the grammar.

    The library finds these tokens and may take milliseconds for it, so `prepare` finds them for many requests at once,
    in the threads of `executor`. The library bounds the work of a mask, to some tens of milliseconds at worst. Masks
    that are slow share a time in each step, and the requests for which none of it is left end.
    """

    walks = True

    def __init__(self, compiled: Compiled, executor: LLExecutor) -> None:
        self._compiled, self._executor = compiled, executor
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_size = compiled.tokenizer.vocab_size
        self._allowed_W: np.ndarray | None = None  # None until they are found
        self._taken: list[int] = []  # tokens that the matcher has seen
        self._alone, self._took = False, 0.0  # whether its mask is found by itself; seconds that the last such took
        self._late = False  # no time was left for it
        self._drafting = False  # it is led along drafts, between `save` and `restore`

    @staticmethod
    def prepare(masks: Iterable[GrammarMask]) -> None:
        """Find the tokens that each of the masks allows."""
        asked = [mask for mask in masks if mask._allowed_W is None]
        if not asked:
            return
        bits_RW = np.zeros((len(asked), token_bits.num_words(asked[0]._vocab_size)), np.int32)
        together = [n for n, mask in enumerate(asked) if not mask._alone]
        alone = [(mask, n) for n, mask in enumerate(asked) if mask._alone]
        if len(together) < WORTH_THREADS:
            for n in together:
                asked[n]._find_alone(bits_RW, n)
        else:
            started = time.monotonic()
            matchers = [(asked[n]._matcher, n) for n in together]
            fill_next_token_bitmask_par(asked[0]._executor, matchers, bits_RW)
            if time.monotonic() - started > SLOW:  # some mask is slow, or the machine is busy
                for n in together:
                    asked[n]._alone, asked[n]._took = True, 0.0
        _find_slow(alone, bits_RW)
        for mask, bits_W in zip(asked, bits_RW.view(np.uint32), strict=True):
            mask._allowed_W = bits_W

    def accept(self, token_id: int) -> None:
        self._allowed_W = None
        if self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token_id):
            raise self._failed(self._matcher.get_error() or f"token {token_id} does not follow it")
        self._taken.append(token_id)
        if len(self._taken) % NOTED == 0:
            self._compiled.note(self._matcher)

    def allowed(self) -> np.ndarray:
        self.prepare([self])
        if self._matcher.is_error():  # some limits of the library show only during generation
            raise self._failed(self._matcher.get_error())
        if self._late:
            raise wrong(
                f"each of its tokens takes {1e3 * self._took:.0f} ms to be checked, and there is no time for that "
                "beside other such grammars; make it simpler"
            )
        assert self._allowed_W is not None
        return self._allowed_W

    def forced(self) -> list[int]:
        """Return the longest token that is allowed if the others are beginnings of it."""
        bits_W = self.allowed()
        if np.count_nonzero(bits_W) > MOST_SPELLINGS:
            return []
        ids = np.flatnonzero(token_bits.unpacked(bits_W, self._vocab_size)).tolist()
        if len(ids) > MOST_SPELLINGS or any(map(self._compiled.tokenizer.is_special_token, ids)):
            return []
        spelled = {token: self._compiled.tokenizer.decode_bytes([token]) for token in ids}
        longest = max(ids, key=lambda token: len(spelled[token]), default=None)
        if longest is None or not all(spelled[longest].startswith(text) for text in spelled.values()):
            return []
        return [longest]

    def save(self) -> tuple[int, np.ndarray | None]:
        self._drafting = True
        return len(self._taken), self._allowed_W

    def restore(self, state: object) -> None:
        self._drafting = self._late = False
        taken, self._allowed_W = cast("tuple[int, np.ndarray | None]", state)
        back = len(self._taken) - taken
        del self._taken[taken:]
        if self._matcher.is_error() or not self._matcher.rollback(back):  # the library never leaves that state
            self._matcher = self._compiled.matcher.deep_copy()
            self._matcher.consume_tokens(self._taken)

    def _find_alone(self, bits_RW: np.ndarray, n: int) -> None:
        """Find the mask in this thread, into row n, and note how long that takes."""
        started = time.thread_time()
        fill_next_token_bitmask(self._matcher, bits_RW, n)
        self._took = time.thread_time() - started
        self._alone = self._took > SLOW

    def _failed(self, reason: str) -> Exception:
        self._compiled.failed = True
        return wrong(reason)


def _find_slow(masks: Sequence[tuple[GrammarMask, int]], bits_RW: np.ndarray) -> None:
    """Find masks one by one, each into its row. First come those of owners whose masks took the least time lately; of
    masks that are known to be slow, those that come too late are left out, and so are drafts."""
    spent: dict[str, float] = {}
    for mask, _ in masks:
        spent[mask._compiled.owner] = spent.get(mask._compiled.owner, 0.0) + mask._took
    left = SLOW_TOGETHER
    for mask, n in sorted(masks, key=lambda each: (spent[each[0]._compiled.owner], each[0]._took)):
        mask._late = mask._drafting or (left < SLOW_TOGETHER and mask._took > max(SLOW, left))
        if not mask._late:
            mask._find_alone(bits_RW, n)
            left -= mask._took if mask._alone else 0.0


class Waiting(NamedTuple):
    submit: Submit
    job: Job[Compiled]


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
        self._under_way: dict[tuple[str, Grammar], Job[Compiled]] = {}  # by owner
        self._kept = Kept()

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
        """Return the jobs decided since the last call, with their results."""
        found: list[tuple[bytes, Submit, TokenMask | Exception]] = []
        for (connection, number), waiting in list(self._waiting.items()):
            if (outcome := self._outcome(waiting)) is not None:
                found.append((connection, waiting.submit, outcome))
                del self._waiting[connection, number]
        if found:
            self._drop_unwanted()
        return found

    def _job(self, connection: bytes, submit: Submit, grammar: Grammar) -> Job[Compiled]:
        """Return the job that compiles a grammar. All completions of a request share one, and it is done already if the
        grammar was used lately."""
        owner = f"{connection.hex()} {submit.owner}"
        job = self._under_way.get((owner, grammar))
        if job is not None:
            return job
        if (kept := self._kept.find(submit.owner, grammar)) is not None:
            job = Job(owner, lambda: kept)
            job.run()
            return job
        try:
            compile_it = partial(self._compiled, grammar, submit.owner)
            job = self._under_way[owner, grammar] = self._pool.submit(owner, compile_it)
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
        compiled = job.future.result()
        assert grammar is not None
        self._kept.add(grammar, compiled)
        return GrammarMask(compiled, self._executor)

    def _drop_unwanted(self) -> None:
        """Forget jobs for which no request waits. Those that have not begun never will."""
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

    def _compiled(self, grammar: Grammar, owner: str) -> Compiled:
        return Compiled(grammars.matcher(grammar, self._tokenizer), self._tokenizer, owner, self._kept)
