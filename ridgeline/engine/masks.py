"""Token masks, which are somebody else's code: whatever they do, only their own request may suffer. And the one mask
of our own: `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.request import MASK_FAILED, Request, TokenMask
from ridgeline.engine.sequence import Sequence, Status

T = TypeVar("T")

Fail = Callable[[Sequence, str], None]


class TokenRules:
    """What a request's `allowed_token_ids` and `bad_words` (token ids) leave of the vocabulary, or of what its own mask
    allows. A word of several tokens forbids its last one wherever the others have just come, in the prompt or after it.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params, self._inner = request.params, request.token_mask
        words = [tuple(map(int, word)) for word in params.bad_words or ()]
        self._always_V = np.full(vocab_size, params.allowed_token_ids is None)
        self._always_V[list(params.allowed_token_ids or ())] = True
        self._always_V[[word[0] for word in words if len(word) == 1]] = False
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        begun = max(map(len, words), default=1) - 1
        self._recent = deque(request.prompt_token_ids[-begun:] if begun else (), maxlen=begun)

    def accept(self, token_id: int) -> None:
        self._recent.append(token_id)
        if self._inner is not None:
            self._inner.accept(token_id)

    def allowed(self) -> np.ndarray:
        inner: TokenMask | None = self._inner
        found_V = self._always_V if inner is None else self._always_V & inner.allowed()
        recent = tuple(self._recent)
        near = self._longer.get(recent[-1], ()) if recent else ()
        ends = [word[-1] for word in near if recent[1 - len(word) :] == word[:-1]]
        if ends:
            found_V = found_V.copy()
            found_V[ends] = False
        return found_V


def constrained(request: Request, vocab_size: int) -> Request:
    """The request with a mask for the rules that its parameters have, if any."""
    if request.params.allowed_token_ids is None and not request.params.bad_words:
        return request
    return replace(request, token_mask=TokenRules(request, vocab_size))


def allowed(seq: Sequence, fail: Fail) -> np.ndarray | None:
    """bool [vocab_size] for the request's next token; None where it has no mask, or was ended by `fail`."""
    mask = seq.request.token_mask
    if mask is None or seq.status is Status.FINISHED:
        return None

    def checked() -> np.ndarray:
        found = mask.allowed()
        if not found.any():
            raise InvalidRequest("it allows no token.")
        return found

    return _guarded(checked, seq, fail)


def accept(seq: Sequence, token: int, fail: Fail) -> None:
    """Advance the request's mask, if it has one, over an emitted token."""
    mask = seq.request.token_mask
    if mask is not None and token >= 0 and seq.status is not Status.FINISHED:
        _guarded(lambda: mask.accept(token), seq, fail)


def _guarded(action: Callable[[], T], seq: Sequence, fail: Fail) -> T | None:
    try:
        return action()
    except Exception as error:  # a grammar may fail in any way
        known = isinstance(error, InvalidRequest)  # its words are for the caller
        fail(seq, f"{MASK_FAILED}: {error}" if known else f"{MASK_FAILED}: {type(error).__name__}: {error}")
        return None
