"""Pieces of answers, held back and cut: what clients join is always the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serving.generation.pieces import Piece, held, split
from ridgeline.text.outputs import CompletionOutput

TEXTS = st.lists(st.text("ab \n", max_size=3), max_size=4)
# of which completion, the texts of its tokens, and text behind them
STEPS = st.lists(st.tuples(st.integers(0, 2), TEXTS, st.text("xyz", max_size=2)), max_size=20)


def pieces_of(steps: list[tuple[int, list[str], str]]) -> list[Piece]:
    """Each completion ends with its last step."""
    outputs = [CompletionOutput(index) for index in range(3)]
    last = {index: place for place, (index, _, _) in enumerate(steps)}
    return [
        Piece("".join(texts) + rest, [1] * len(texts), outputs[index], [*map(len, texts)], last[index] == place)
        for place, (index, texts, rest) in enumerate(steps)
    ]


async def collected(pieces: list[Piece], interval: int, ready_after: int) -> list[Piece]:
    taken = 0

    async def come() -> AsyncIterator[Piece]:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    return [piece async for piece in held(come(), interval, lambda: taken > ready_after or taken == len(pieces))]


@given(STEPS, st.integers(1, 5), st.integers(0, 6))
def test_pieces_held_back_join_to_the_same_answers(
    steps: list[tuple[int, list[str], str]], interval: int, ready_after: int
) -> None:
    came = pieces_of(steps)
    found = asyncio.run(collected(came, interval, ready_after))
    for index in range(3):
        before, after = ([piece for piece in each if piece.output.index == index] for each in (came, found))
        for part in ("text", "token_ids", "lengths"):
            joined = [[item for piece in each for item in getattr(piece, part)] for each in (before, after)]
            assert joined[0] == joined[1]
        assert [piece.ended for piece in after] == [False] * (len(after) - 1) + [True] * bool(after)
        assert all(len(piece.token_ids) >= interval for piece in after[1:-1])


@given(TEXTS, st.text("xyz", max_size=2), st.booleans())
def test_a_piece_for_each_token_joins_to_the_whole(texts: list[str], rest: str, ended: bool) -> None:
    whole = Piece("".join(texts) + rest, [*range(len(texts))], CompletionOutput(0), [*map(len, texts)], ended)
    found = list(split(whole))
    assert "".join(piece.text for piece in found) == whole.text
    assert [token for piece in found for token in piece.token_ids] == whole.token_ids
    assert [piece.ended for piece in found] == [False] * (len(found) - 1) + [ended]
    assert [piece.text for piece in found[:-1]] == texts[:-1]
    assert not texts or found[-1].text == texts[-1] + rest, "what came without a token belongs to the last"
