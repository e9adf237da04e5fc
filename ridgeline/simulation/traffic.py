"""Requests as a simulation sees them: lengths and what they share, in place of tokens.

A prompt is a row of pieces. A piece is the first tokens of some content, and a content is a number: equal numbers stand
for equal tokens. So a prompt of 100,000 tokens is a few numbers, and two prompts share what their first pieces have in
common. The cache finds that by the same hashes as in a server: they are computed once for each piece (`Prompts`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

from ridgeline.core.errors import InvalidConfig
from ridgeline.engine.cache.prefix import Hash, chain_hashes

MOST_CONTENT = 1 << 30  # contents are token ids in the engine, whose higher bits mean something
KEPT_HASHES = 1 << 20  # about 80 MB


class Piece(NamedTuple):
    """The first `tokens` tokens of a content, a number from 0 to MOST_CONTENT - 1."""

    content: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request of a client.

    number: no other request of the traffic has it. at: seconds at which it leaves the client. answer: what the model
    will write; a later prompt may hold it. limit: the most tokens that the client lets it write (0: as many as come).
    seen: tokens of the prompt's beginning that were in earlier prompts or answers, which a cache that never forgets
    would have. session: the conversation that it belongs to (-1: none). tenant, priority: as of an engine's request.
    """

    number: int
    at: float
    prompt: tuple[Piece, ...]
    answer: Piece
    limit: int = 0
    seen: int = 0
    session: int = -1
    tenant: str = ""
    priority: int = 0

    @property
    def length(self) -> int:
        """The tokens of the prompt."""
        return sum(piece.tokens for piece in self.prompt)


class Traffic(Protocol):
    """Requests that come by themselves, and those that clients send once an answer is there."""

    def begin(self) -> Iterator[Ask]:
        """Yield the requests that come by themselves, in order of time."""

    def after(self, ask: Ask, ended: float) -> Sequence[Ask]:
        """Return the requests that follow from the end of an answer, at `ended` or later."""


class Listed:
    """Traffic of which no request waits for another's answer."""

    def __init__(self, asks: Iterator[Ask]) -> None:
        self._asks = asks

    def begin(self) -> Iterator[Ask]:
        return self._asks

    def after(self, ask: Ask, ended: float) -> Sequence[Ask]:
        return ()


class Prompts:
    """Token ids and hashes of prompts. What pieces have in common is hashed once, while it is remembered.

    root: the hash before a prompt's first block.
    """

    def __init__(self, block_size: int, root: Hash) -> None:
        self._size, self.root = block_size, root
        self._known: OrderedDict[int, tuple[Hash, ...]] = OrderedDict()  # the blocks that end in a piece, by its key
        self._count = 0

    def tokens(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Return the prompt's token ids: a content's number, as often as it has tokens."""
        found = list[int]()
        for content, tokens in pieces:
            found += [content] * tokens
        return tuple(found)

    def hashes(self, pieces: Sequence[Piece]) -> tuple[Hash, ...]:
        """Return the hashes of the prompt's whole blocks."""
        found: list[Hash] = []
        key, rest = 0, list[int]()  # tokens behind the last whole block
        for piece in pieces:
            key = hash((key, piece))
            blocks = self._known.get(key)
            if blocks is None:
                text = [*rest, *repeat(piece.content, piece.tokens)]
                whole = len(text) // self._size * self._size
                blocks = tuple(chain_hashes(found[-1] if found else self.root, text[:whole], self._size))
                self._note(key, blocks)
            found += blocks
            left = (len(rest) + piece.tokens) % self._size
            rest = [*rest, *repeat(piece.content, min(piece.tokens, left))][-left:] if left else []
        return tuple(found)

    def _note(self, key: int, blocks: tuple[Hash, ...]) -> None:
        self._known[key] = blocks
        self._count += 1 + len(blocks)
        while self._count > KEPT_HASHES:
            _, gone = self._known.popitem(last=False)
            self._count -= 1 + len(gone)


def check(ask: Ask, longest: int) -> None:
    """Raise InvalidConfig for a request that no replica could run. longest: tokens of prompt and answer together."""
    if not ask.prompt or min(piece.tokens for piece in (*ask.prompt, ask.answer)) < 1:
        raise InvalidConfig(f"request {ask.number} has an empty prompt, piece or answer; each needs a token.")
    most = ask.length + max(ask.limit, ask.answer.tokens)
    if most > longest:
        raise InvalidConfig(
            f"request {ask.number} has {ask.length} tokens of prompt and up to {most - ask.length} of answer, more "
            f"than the context of {longest}; raise --max-model-len or leave it out."
        )
