"""Structured outputs: grammars as data, and the masks that hold a request to one (by llguidance).

A face checks a grammar before it accepts the request (`check`); the engine's process compiles it once more, next to the
steps, and asks it for a mask at every token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ridgeline.core import token_bits
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.request import TokenMask
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar, Submit

WORTH_THREADS = 4  # masks; fewer are found sooner than threads are woken
THREADS = 2  # of the compiler, which lets the interpreter go
MOST_CHARS = 65_536  # of a grammar's text
MOST_DEPTH = 64  # of a schema's nesting
MOST_REASON = 400  # characters of what the library says
# Bounded: a weak model would indent until its tokens end.
WHITESPACE: Any = {"whitespace_pattern": r"\n?[ \t]{0,16}"}


def compiled(grammar: Grammar) -> str:
    """As llguidance wants it. Raises InvalidRequest where it is none."""
    try:
        match grammar.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(grammar.text or '{"type": "object"}', defaults=WHITESPACE)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
                return LLMatcher.grammar_from_lark(f"start: {choices}")
            case "grammar":
                return LLMatcher.grammar_from_lark(grammar.text)
    except Exception as error:  # the library raises what it likes
        raise _wrong(str(error)) from None


def check(grammar: Grammar) -> None:
    """Raises InvalidRequest, with the reason, for a grammar that cannot be used."""
    if len(grammar.text) > MOST_CHARS:
        raise _wrong(f"it has {len(grammar.text)} characters; at most {MOST_CHARS} are allowed")
    error = LLMatcher.validate_grammar(compiled(grammar))
    if error:
        raise _wrong(error)


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
            raise _wrong(self._matcher.get_error() or f"token {token_id} does not follow it")

    def allowed(self) -> np.ndarray:
        self.prepare([self])
        if self._matcher.is_error():  # some limits of the library show only on the way
            raise _wrong(self._matcher.get_error())
        assert self._allowed_W is not None
        return self._allowed_W


class Grammars:
    """Compiles off the engine's thread. done() hands over what is ready, or why it never will be."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: list[int], timeout: float) -> None:
        self._folder, self._vocab_size, self._eos_ids, self._timeout = folder, vocab_size, eos_ids, timeout
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._executor = LLExecutor()
        self._waiting: dict[tuple[bytes, int], tuple[Submit, float, Future[TokenMask]]] = {}

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def compile(self, connection: bytes, submit: Submit) -> None:
        assert submit.grammar is not None
        future = self._pool.submit(self._mask, submit.grammar)
        self._waiting[connection, submit.id] = submit, monotonic() + self._timeout, future

    def cancel(self, connection: bytes, numbers: list[int]) -> list[int]:
        """Those of the numbers that were waiting here."""
        found = [number for number in numbers if (connection, number) in self._waiting]
        for number in found:
            self._waiting.pop((connection, number))[2].cancel()
        return found

    def forget(self, connection: bytes) -> None:
        """Its face is gone."""
        self.cancel(connection, [number for other, number in self._waiting if other == connection])

    def done(self) -> list[tuple[bytes, Submit, TokenMask | Exception]]:
        """What is decided since the last call."""
        found: list[tuple[bytes, Submit, TokenMask | Exception]] = []
        for (connection, number), (submit, deadline, future) in list(self._waiting.items()):
            if future.done():
                found.append((connection, submit, future.exception() or future.result()))  # type: ignore[arg-type]
            elif monotonic() > deadline:
                future.cancel()
                found.append((connection, submit, _wrong(f"compiling it took longer than {self._timeout:g} s")))
            else:
                continue
            del self._waiting[connection, number]
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            Tokenizer.from_folder(self._folder).backend.to_str(), self._vocab_size, self._eos_ids or None
        )

    def _mask(self, grammar: Grammar) -> TokenMask:
        matcher = LLMatcher(self._tokenizer, compiled(grammar), log_level=0)
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        return GrammarMask(matcher, self._vocab_size, self._executor)


def _wrong(reason: str) -> InvalidRequest:
    """In one line: the library's words, without the dump of its state that follows them."""
    words = " ".join(reason.partition("<state>")[0].split())
    shown = words if len(words) <= MOST_REASON else words[: MOST_REASON // 2] + " … " + words[-MOST_REASON // 2 :]
    return InvalidRequest(f"the grammar cannot be used: {shown.rstrip('.')}.", param="structured_outputs")
