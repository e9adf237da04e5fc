"""Drafts for rows with token masks, which the host makes when it makes the masks.

The mask of a position follows from all tokens before it, so the device cannot know it along drafts of its own. But the
host knows all tokens of such a request when its mask is due. So it guesses the next tokens, advances the mask over
these guesses, and restores it. Guesses are

* the only token that a mask allows, which is always right;
* the longest token with which the text goes on, if a grammar allows only beginnings of it;
* what followed the request's last tokens where they stood before, if prompt lookup is asked for.

Masks of one kind find what they allow together (`masks.prepare`), so all rows take their steps side by side.

Legend:
    D  drafts of a row
    W  words of 32 tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from ridgeline.core.plan import token_bits
from ridgeline.core.plan.request import DraftingMask, drafting
from ridgeline.core.plan.step import MaskedDrafts
from ridgeline.engine.masks import Fail, guarded, prepare
from ridgeline.engine.sequence import Sequence
from ridgeline.kernels.step.lookup.continued import continued

Lengths = tuple[int, int]  # of the tokens that prompt lookup compares: at least, at most; 0, 0: it looks nothing up


class Walk:
    """The way of one mask along drafts. bits_W: what it allows now. most: drafts that there may be.

    The mask goes back to where it was by `end`, whatever happened on the way.
    """

    def __init__(self, seq: Sequence, mask: DraftingMask, bits_W: np.ndarray, most: int, lookup: Lengths) -> None:
        room = seq.request.max_total_tokens - len(seq.tokens) - 1  # a draft is followed by one more token
        self.mask, self._seq, self._most, self._lookup = mask, seq, min(most, room), lookup
        self._stops = seq.request.all_stop_ids
        self._state = mask.save()
        self._found_W = bits_W  # behind the last draft
        self._tokens: list[int] = []
        self._bits: list[np.ndarray] = []
        self._expected: list[int] | None = None  # from the text; None: it was not looked at here
        self._moved: int | None = None  # the token that the mask accepted last

    def advances(self) -> bool:
        """Lead the mask over a guess. Return False if there is none."""
        if len(self._tokens) >= self._most:
            return False
        try:
            if (guess := self._guess()) is None:
                return False
            self._moved = guess
            self.mask.accept(guess)
        except Exception:  # if the token comes nevertheless, the request ends by it
            return False
        return True

    def arrives(self) -> bool:
        """Take the guess as a draft, with the mask behind it. Return False if nothing could follow."""
        assert self._moved is not None
        try:
            found_W = self.mask.allowed()
            if token_bits.is_empty(found_W):
                return False
        except Exception:
            return False
        self._found_W = found_W.copy()
        self._tokens.append(self._moved)
        self._bits.append(self._found_W)
        return True

    def end(self) -> None:
        """Bring the mask back."""
        self.mask.restore(self._state)

    @property
    def drafts(self) -> MaskedDrafts:
        bits_DW = np.stack(self._bits) if self._bits else np.empty((0, len(self._found_W)), np.uint32)
        return MaskedDrafts(np.array(self._tokens, np.int32), bits_DW)

    def _guess(self) -> int | None:
        """Return the next token if one is known that the mask allows and that does not end the request."""
        guess = token_bits.only(self._found_W)
        if guess is None:
            guess = next(iter(self.mask.forced()), None)
        if guess is None and self._lookup[1]:
            if self._expected is None:
                self._expected = self._looked_up()
            guess = self._expected[0] if self._expected else None
        if guess is None or guess in self._stops or not token_bits.has(self._found_W, guess):
            return None
        self._expected = self._expected[1:] if self._expected and self._expected[0] == guess else None
        return guess

    def _looked_up(self) -> list[int]:
        """Return the tokens that followed the text's last tokens where they stood before."""
        text = self._seq.text
        text.extend(self._seq.tokens[len(text) :])
        known = len(text)
        text.extend(self._tokens)
        found_D, _ = continued(np.frombuffer(text, np.int32), self._most - len(self._tokens), *self._lookup)
        guesses: list[int] = found_D.tolist()
        del found_D, text[known:]
        return guesses


def drafted(
    wanted: Mapping[int, tuple[Sequence, int]], masks: dict[int, np.ndarray], lookup: Lengths, fail: Fail
) -> dict[int, MaskedDrafts]:
    """Return the drafts of rows, with their masks.

    wanted: row → its sequence, and how many drafts it may verify.
    masks: the rows' masks where they are now. They are replaced by copies, since masks that go on overwrite them.
    """
    walks: dict[int, Walk] = {}
    for row, (seq, most) in wanted.items():
        if row in masks and (mask := drafting(seq.request.token_mask)) is not None:
            masks[row] = masks[row].copy()
            begun = guarded(partial(Walk, seq, mask, masks[row], most, lookup), seq, fail)
            walks |= {} if begun is None else {row: begun}
    going: Iterable[Walk] = walks.values()
    while going := [walk for walk in going if walk.advances()]:
        prepare(walk.mask for walk in going)
        going = [walk for walk in going if walk.arrives()]
    for row, walk in walks.items():
        guarded(walk.end, wanted[row][0], fail)
    return {row: walk.drafts for row, walk in walks.items()}
