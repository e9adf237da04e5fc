"""Structured outputs: grammars as data, and whether one can be used (by llguidance).

An API server checks a grammar before it accepts the request, in a process that can be ended (checks.py); the engine's
process compiles it once more, next to the steps, and asks it for a mask at every token (masks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ridgeline.core.errors import InvalidRequest
from ridgeline.transport.messages import Grammar

MOST_CHARS = 65_536  # of a grammar's text
MOST_DEPTH = 64  # of a schema's nesting
MOST_REASON = 400  # characters of what the library says
BYTES = LLTokenizer("byte")
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
            case "grammar":
                return LLMatcher.grammar_from_lark(grammar.text)
    except Exception as error:  # the library raises what it likes
        raise wrong(str(error)) from None


class Vocabulary:
    """Bytes, behind as many ids as a model's tokens have, of which those in `named` are what they are called. For
    llguidance's TokenizerWrapper."""

    bos_token_id = None

    def __init__(self, named: Mapping[str, int], size: int) -> None:
        self._size, self.eos_token_id = size, size + 256
        self.tokens = [b"\xff[%d]" % number for number in range(size)]
        for name, number in named.items():
            self.tokens[number] = name.encode()
        self.tokens += [bytes([byte]) for byte in range(256)] + [b"<eos>"]
        self.special_token_ids = [*range(size), self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self._size + byte for byte in text]


def vocabulary(named: Mapping[str, int], size: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary(named, size)))


def check(grammar: Grammar, tokenizer: LLTokenizer = BYTES) -> None:
    """Raises InvalidRequest, with the reason, for a grammar that cannot be used.

    It does what the engine will do, over a vocabulary of bytes: to look at the grammar alone takes no time where its
    automaton takes minutes (a `multipleOf` of a million).
    """
    if len(grammar.text) > MOST_CHARS:
        raise wrong(f"it has {len(grammar.text)} characters; at most {MOST_CHARS} are allowed")
    matcher = LLMatcher(tokenizer, compiled(grammar), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise wrong(matcher.get_error())


def checker() -> Callable[[dict[str, Any]], str | None]:
    """Make the work of a child of `Confined`: {kind, text} of a grammar → None, or the sentence why it cannot be used.
    named, size: as of `Vocabulary`, where the grammar may speak of the model's own tokens."""

    def run(asked: dict[str, Any]) -> str | None:
        try:
            tokenizer = vocabulary(asked["named"], asked["size"]) if asked["size"] else BYTES
            check(Grammar(kind=asked["kind"], text=asked["text"]), tokenizer)
        except InvalidRequest as error:
            return str(error)
        return None

    return run


def wrong(reason: str) -> InvalidRequest:
    """In one line: the library's words, without the dump of its state that follows them."""
    words = " ".join(reason.partition("<state>")[0].split())
    shown = words if len(words) <= MOST_REASON else words[: MOST_REASON // 2] + " … " + words[-MOST_REASON // 2 :]
    return InvalidRequest(f"the grammar cannot be used: {shown.rstrip('.')}.", param="structured_outputs")
