"""The mask of a request that reasons before it answers. It ends reasoning that has spent its budget, and lets the
request's own mask begin where the reasoning has ended.

Legend: W words of packed bits (`core.plan.token_bits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from ridgeline.core.plan import token_bits
from ridgeline.core.plan.request import Request, Thinking, TokenMask, drafting


class ThinkingMask:
    """The mask of one request. It is in one of three states.

    before: nothing has come. The output may begin the reasoning or, by its own mask, the answer.
    within: any token may come until those have come that end it.
    behind: the request's own mask decides.

    A budget is spent token by token. Then the closing tokens are the only ones allowed, one after the other, from the
    one on that is still missing.
    """

    def __init__(self, request: Request, thinking: Thinking, vocab_size: int) -> None:
        self._thinking, self._inner = thinking, request.token_mask
        self._all_W = token_bits.packed(np.ones(vocab_size, bool))
        self._found_W = self._all_W.copy()
        held = self._inner is not None and not thinking.may_stop
        self._stops = token_bits.Few(token for token in request.eos_ids if held and token < vocab_size)
        self._within, self._behind = thinking.inside, False
        self._forced = list(thinking.opening)  # tokens that must come now
        self._recent: list[int] = []  # of those that may be part of what begins or ends the reasoning
        self._longest = max(map(len, (*thinking.begins, *thinking.ends, thinking.closing)), default=1)
        self._spent, self._closing = 0, False
        if self._within and not self._forced:
            self._spend(0)

    @staticmethod
    def prepare(masks: Iterable[ThinkingMask]) -> None:
        """Do together the work that the requests' own masks can share, where they decide, as `TokenMask` describes."""
        kinds: dict[type, list[TokenMask]] = {}
        for mask in masks:
            if mask._inner is not None and not mask._within and not mask._forced:
                kinds.setdefault(type(mask._inner), []).append(mask._inner)
        for kind, inner in kinds.items():
            if hasattr(kind, "prepare"):
                kind.prepare(inner)

    def accept(self, token_id: int) -> None:
        if self._behind:
            if self._inner is not None:
                self._inner.accept(token_id)
            return
        forced = self._forced[:1]
        del self._forced[:1]
        self._recent = [*self._recent[1 - self._longest :], token_id] if self._longest > 1 else [token_id]
        if self._within:
            closed = self._closing and not self._forced
            if closed or _ended(self._recent, self._thinking.ends):
                self._within, self._behind, self._forced = False, True, []
            elif not self._forced:
                self._spend(0 if forced else 1)
        elif _ended(self._recent, self._thinking.begins):
            self._within, self._recent = True, []
            self._spend(0)
        elif not self._begun():
            self._behind = True
            if self._inner is not None:
                self._inner.accept(token_id)

    def allowed(self) -> np.ndarray:
        if self._forced:
            return self._only(self._forced[:1])
        if self._within:
            np.copyto(self._found_W, self._all_W)
            self._stops.remove(self._found_W)
            return self._found_W
        if self._inner is None:
            return self._all_W
        if self._behind:
            return self._inner.allowed()
        found_W = self._only(self._begun())
        if self._recent:  # what has come of a beginning is not the mask's own, so nothing else may follow
            return found_W
        return np.bitwise_or(self._inner.allowed(), found_W, out=found_W)

    @property
    def walks(self) -> bool:
        return self._inner is None or drafting(self._inner) is not None

    def forced(self) -> Sequence[int]:
        inner = drafting(self._inner) if self._behind else None
        return self._forced if inner is None else inner.forced()

    def save(self) -> object:
        own = self._within, self._behind, self._forced.copy(), self._recent, self._spent, self._closing
        inner = drafting(self._inner)
        return own, None if inner is None else inner.save()

    def restore(self, state: object) -> None:
        own, saved = cast("tuple[tuple, object]", state)
        self._within, self._behind, forced, self._recent, self._spent, self._closing = own
        self._forced = forced.copy()
        if (inner := drafting(self._inner)) is not None:
            inner.restore(saved)

    def _begun(self) -> list[int]:
        """Return the tokens that would go on with a beginning of the reasoning."""
        length = len(self._recent)
        return [ids[length] for ids in self._thinking.begins if len(ids) > length and [*ids[:length]] == self._recent]

    def _spend(self, tokens: int) -> None:
        """Count tokens of the reasoning, and force its end where none is left."""
        self._spent += tokens
        closing, budget = self._thinking.closing, self._thinking.budget
        if budget is not None and self._spent >= budget:
            known = next(
                n for n in range(len(closing), -1, -1) if self._recent[len(self._recent) - n :] == [*closing[:n]]
            )
            self._forced, self._closing = list(closing[known:]), True

    def _only(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the set of these tokens alone."""
        self._found_W[:] = 0
        for token in tokens:
            self._found_W[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return self._found_W


def _ended(recent: list[int], sequences: Iterable[tuple[int, ...]]) -> bool:
    return any(len(ids) <= len(recent) and tuple(recent[len(recent) - len(ids) :]) == ids for ids in sequences)
