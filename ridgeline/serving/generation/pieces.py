"""The pieces in which answers come, and what makes larger or smaller ones of them."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.events import Content, Event


class Piece(NamedTuple):
    """The part of one completion that is new. `output` is the whole completion so far, with the logprobs of its tokens,
    and why it ended.

    lengths: those of the texts that each token brought.
    ended: it is the completion's last piece.
    read: the events that a reader found in the text; None where all text is content, so that nothing had to be read.
    """

    text: str
    token_ids: list[int]
    output: CompletionOutput
    lengths: Sequence[int] = ()
    ended: bool = False
    read: Sequence[Event] | None = None

    @property
    def events(self) -> Sequence[Event]:
        """The piece's content, reasoning and tool calls."""
        return self.read if self.read is not None else [Content(self.text)] if self.text else []


class Usage(NamedTuple):
    """The tokens of an answer so far."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


async def held(
    pieces: AsyncIterable[Piece], interval: int, ready: Callable[[], bool] = lambda: True
) -> AsyncIterator[Piece]:
    """Yield the pieces, of which all but a choice's first and last have at least `interval` tokens, and none comes
    before all are `ready`: of several completions one may be ahead of the one that is waited for."""
    waiting: dict[int, Piece] = {}
    begun = set[int]()
    held_back = False
    async for piece in pieces:
        own = piece.output.index
        waiting[own] = _joined(waiting[own], piece) if own in waiting else piece
        if not ready():
            held_back = True
            continue
        for index in list(waiting) if held_back else (own,):  # else only this choice may have become long enough
            each = waiting[index]
            if index not in begun or len(each.token_ids) >= interval or each.ended:
                begun.add(index)
                yield waiting.pop(index)
        held_back = False


def _joined(one: Piece, other: Piece) -> Piece:
    lengths = [*one.lengths, *other.lengths]
    return Piece(one.text + other.text, one.token_ids + other.token_ids, other.output, lengths, other.ended)


def split(piece: Piece) -> Iterator[Piece]:
    """Yield a piece for each token. What came without a token of its own belongs to the last."""
    if not piece.lengths:
        yield piece
    begin, last = 0, len(piece.lengths) - 1
    for place, (token_id, length) in enumerate(zip(piece.token_ids, piece.lengths, strict=True)):
        text = piece.text[begin:] if place == last else piece.text[begin : begin + length]
        begin += length
        yield Piece(text, [token_id], piece.output, [length], piece.ended and place == last)
