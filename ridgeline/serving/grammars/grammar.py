"""Structured outputs: grammars as data, and the check that llguidance can use one.

An API server checks a grammar before it accepts the request, in a process that can be killed (checks.py). The engine's
process compiles the grammar once more, beside the steps, and asks it for a mask at every token (masks.py). Both give
llguidance the same text and the same limits.

llguidance can also compute the whole text that must come next ("forcing"), and then allows only the tokens in which the
model's tokenizer writes that text. This is switched off for two reasons. The forced text of a short grammar may have
millions of characters, and the tokenizer writes text such as `<think>` as an added token, which the grammar refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars import schemas
from ridgeline.serving.grammars.ebnf import is_ebnf, to_lark
from ridgeline.serving.grammars.quoted import string_of
from ridgeline.transport.messages import Grammar

MOST_CHARS = 65_536  # in a grammar's text
MOST_USABLE = 1 << 20  # characters of a grammar that was put into other words
MOST_DEPTH = 64  # levels of nesting in a schema
MOST_REASON = 400  # characters of the library's reason
BYTES = LLTokenizer("byte")
MOST_STATES = 100_000  # of a grammar's lexer, at most about 400 bytes each
LIMITS = LLParserLimits(max_lexer_states=MOST_STATES)
# Where in the library's text of a grammar an error is: the client wrote other text.
PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON)|\n *(\d+ \|.*|\^)(?=\n|$)")
UNFORCED = '\n%llguidance {"no_forcing": true}'  # the last such line of a grammar counts
# Bounded, because a weak model would indent until its tokens run out.
WHITESPACE: Any = {"whitespace_pattern": r"\n?[ \t]{0,16}"}
DETAILS: Any = WHITESPACE | {"json_allowed_escapes": schemas.ESCAPES}


def compiled(grammar: Grammar) -> str:
    """Return the grammar in llguidance's form. Raise InvalidRequest if it is not a grammar."""
    try:
        return _lark(grammar) + UNFORCED
    except Exception as error:  # the library may raise anything
        raise wrong(str(error)) from None


def _lark(grammar: Grammar) -> str:
    match grammar.kind:
        case "json":
            schema = grammar.text or '{"type": "object"}'
            made = LLMatcher.grammar_from_json_schema(schema, defaults=DETAILS, overrides={"lenient": False})
            return "start: %json " + _part(made, "json_schema")
        case "regex":
            made = LLMatcher.grammar_from_regex(grammar.text)
            return msgspec.json.decode(_part(made, "lark_grammar"), type=str)
        case "grammar":
            return grammar.text
        case "quoted":
            return string_of(grammar.text)


def _part(made: str, name: str) -> str:
    """Return a part of what the library made, without reading it: it may be long."""
    return bytes(msgspec.json.decode(made, type=_Made).grammars[0][name]).decode()


class _Made(msgspec.Struct):
    grammars: list[dict[str, msgspec.Raw]]


def matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher for the grammar that has seen no token. Raise InvalidRequest with the reason if there is none.

    The first mask is computed here, so that no step waits for it.
    """
    found = LLMatcher(tokenizer, compiled(grammar), log_level=0, limits=LIMITS)
    if not found.is_error():
        found.compute_bitmask()
    if found.is_error():
        raise wrong(found.get_error())
    return found


class Vocabulary:
    """A vocabulary of single bytes, for llguidance's TokenizerWrapper. Its ids are as many as the model's tokens, and
    the tokens in `named` have their own names."""

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
    """Raise InvalidRequest with the reason if the grammar cannot be used.

    The check does what the engine will do, over a vocabulary of bytes. Parsing alone would not tell: it takes no time
    even where building the automaton takes minutes (a `multipleOf` of a million).
    """
    matcher(grammar, tokenizer)


def usable(grammar: Grammar, tokenizer: LLTokenizer = BYTES) -> Grammar:
    """Return the grammar in words that can be used. Raise InvalidRequest with the reason if there are none."""
    if len(grammar.text) > MOST_CHARS:
        raise wrong(f"it has {len(grammar.text)} characters; at most {MOST_CHARS} are allowed")
    *others, last = _forms(grammar)
    for form in others:
        try:
            check(form, tokenizer)
        except InvalidRequest:
            continue
        return form
    check(last, tokenizer)
    return last


def _forms(grammar: Grammar) -> Iterator[Grammar]:
    """Yield the forms of a grammar, the best first: of a schema one whose numbers are bounded. Raise InvalidRequest."""
    if grammar.kind == "grammar" and is_ebnf(grammar.text):
        yield Grammar(kind="grammar", text=to_lark(grammar.text))
        return
    if grammar.kind == "quoted":
        yield Grammar(kind="grammar", text=string_of(grammar.text))
        return
    if grammar.kind == "json" and grammar.text:
        schema = schemas.known(json.loads(grammar.text))
        texts = [json.dumps(each, ensure_ascii=False) for each in (schemas.bounded(schema), schema)]
        fitting = [Grammar(kind="json", text=text) for text in texts if len(text) <= MOST_USABLE]
        if fitting:  # the client's own words could be used no sooner, and would be refused for what does not matter
            yield from fitting
            return
    yield grammar


def checker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that a child of `Confined` runs: from a grammar to {reason, text}: why it cannot be
    used, or None and its text in words that can.

    The grammar comes as {kind, text}. `named` and `size`, as in `Vocabulary`, come with it if it may name the model's
    own tokens.
    """

    def run(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            tokenizer = vocabulary(asked["named"], asked["size"]) if asked["size"] else BYTES
            return {"reason": None, "text": usable(Grammar(kind=asked["kind"], text=asked["text"]), tokenizer).text}
        except InvalidRequest as error:
            return {"reason": str(error), "text": ""}

    return run


def wrong(reason: str) -> InvalidRequest:
    """Return the library's reason in one line, without the dump of its state that follows."""
    words = " ".join(PLACE.sub("", reason.partition("<state>")[0]).split())
    shown = words if len(words) <= MOST_REASON else words[: MOST_REASON // 2] + " … " + words[-MOST_REASON // 2 :]
    return InvalidRequest(f"the grammar cannot be used: {shown.rstrip('.')}.", param="structured_outputs")
