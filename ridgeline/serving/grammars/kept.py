"""Compiled grammars in the engine's process, and how much memory they may take.

The lexer of a grammar grows with the texts that it matches, and all matchers of one compiled grammar share it. So a
grammar is kept for further requests only while it is small, and a request whose grammar grows too large ends.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer

from ridgeline.serving.grammars.grammar import MOST_STATES, wrong
from ridgeline.transport.messages import Grammar

KEPT_BYTES = 256 << 20  # of all grammars that are kept
REUSED_BYTES = 64 << 20  # of one grammar: above that the next request compiles it again
MOST_BYTES = 128 << 20  # of one grammar while requests use it
OWNERS_BYTES = 1 << 30  # of all grammars of one owner while requests use them; above that the large ones end
LARGE = 32 << 20  # of one grammar
# A lexer has a state for each place in a text that it can tell apart. It spends "fuel" on building them, at least one
# unit for each, and the expressions behind a unit take some bytes.
BASE, OF_STATE, OF_FUEL = 1 << 20, 400, 40
FUEL = re.compile(r'"lexer_cost": (\d+)')


class Compiled:
    """A grammar over the model's vocabulary. `matcher` has seen no token.

    `bytes` is an estimate of the memory that the grammar takes, and never below it. `failed` says that a request's text
    broke a limit of its lexer; no other request may have it.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, owner: str = "", kept: Kept | None = None) -> None:
        self.matcher, self.tokenizer, self.owner, self._kept = matcher, tokenizer, owner, kept
        self.failed, self._fuel = False, fuel_of(matcher)

    @property
    def bytes(self) -> int:
        return BASE + OF_STATE * min(self._fuel, MOST_STATES) + OF_FUEL * self._fuel

    def note(self, matcher: LLMatcher) -> None:
        """Note how far a matcher of this grammar has made the lexer grow. Raise InvalidRequest if that is too far."""
        self._fuel = max(self._fuel, fuel_of(matcher))
        if self.bytes > MOST_BYTES:
            raise wrong(f"its text takes more than {MOST_BYTES >> 20} MiB of memory to be checked; make it simpler")
        if self.bytes > LARGE and self._kept is not None and self._kept.of_owner(self.owner) > OWNERS_BYTES:
            raise wrong(
                f"the grammars of this client's requests take more than {OWNERS_BYTES >> 20} MiB of memory; make them "
                "simpler or send fewer at once"
            )


class Kept:
    """The grammars that were used last, by owner. One owner's texts cannot spoil the grammar of another."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, Grammar], Compiled] = OrderedDict()
        self._living: weakref.WeakSet[Compiled] = weakref.WeakSet()  # also those that only requests use

    def __len__(self) -> int:
        return len(self._last)

    @property
    def bytes(self) -> int:
        return sum(compiled.bytes for compiled in self._last.values())

    def of_owner(self, owner: str) -> int:
        """Return the bytes of an owner's grammars, kept or in use."""
        return sum(compiled.bytes for compiled in self._living if compiled.owner == owner)

    def find(self, owner: str, grammar: Grammar) -> Compiled | None:
        """Return the compiled grammar, unless there is none that another request may use."""
        found = self._last.get((owner, grammar))
        if found is None:
            return None
        if found.failed or found.bytes > REUSED_BYTES:
            del self._last[owner, grammar]
            return None
        self._last.move_to_end((owner, grammar))
        return found

    def add(self, grammar: Grammar, compiled: Compiled) -> None:
        """Keep a grammar, and drop those that were not used for longest."""
        self._living.add(compiled)
        if compiled.bytes <= REUSED_BYTES:
            self._last[compiled.owner, grammar] = compiled
        for key in list(self._surplus()):
            del self._last[key]

    def _surplus(self) -> Iterator[tuple[str, Grammar]]:
        room = KEPT_BYTES
        for key, compiled in reversed(self._last.items()):
            room -= compiled.bytes
            if room < 0 or compiled.failed:
                yield key


def fuel_of(matcher: LLMatcher) -> int:
    """Return the fuel that the lexer of a matcher has spent since it was made, for all matchers together.

    The library gives it in the words of an error, so a copy is given a token that does not exist.
    """
    copy = matcher.deep_copy()
    copy.consume_token(0xFFFFFFFF)
    found = FUEL.search(copy.get_error())
    return int(found[1]) if found else 1 << 40
