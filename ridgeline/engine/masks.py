"""Token masks, which are code of others: a fault in a mask affects only its own request. Also the rules that the
request's parameters add: `allowed_token_ids`, `bad_words`, `min_tokens`.

Legend: W words of packed bits (`core.plan.token_bits`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from ridgeline.core.errors import ContractViolation, InvalidRequest
from ridgeline.core.plan import token_bits
from ridgeline.core.plan.request import MASK_FAILED, Request, TokenMask, drafting
from ridgeline.core.specs.model import NO_RULES, OutputRules
from ridgeline.engine.sequence import Sequence, Status
from ridgeline.engine.speech import SpeechMask
from ridgeline.engine.thinking import ThinkingMask

T = TypeVar("T")

Fail = Callable[[Sequence, str], None]


class TokenRules:
    """Mask of what a request's parameters leave of the vocabulary, or of what its own mask allows.

    A bad word of several tokens forbids its last one wherever the others have just come, in the prompt or after it.
    Until min_tokens are out stop ids are forbidden, unless nothing else is left: then the grammar is complete.

    The model's rules come on top, for the last token against all others.
    """

    def __init__(self, request: Request, vocab_size: int, rules: OutputRules = NO_RULES) -> None:
        params, self._inner = request.params, request.token_mask
        words = [*(tuple(map(int, word)) for word in params.bad_words or ()), *rules.bad_words]
        always_V = np.full(vocab_size, params.allowed_token_ids is None)
        always_V[list(params.allowed_token_ids or ())] = True
        always_V[[word[0] for word in words if len(word) == 1]] = False
        self._always_W = token_bits.packed(always_V)
        self._limited = not always_V.all()
        self._found_W = self._always_W.copy()  # written over and over: fresh memory costs more than all the rest
        self._stops = token_bits.Few(token for token in request.all_stop_ids if token < vocab_size)
        self._owed = params.min_tokens  # tokens to come before it may stop
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        begun = max(map(len, words), default=1) - 1
        self._recent = deque(request.prompt_tokens[-begun:] if begun else (), maxlen=begun)
        self._room = request.max_total_tokens - len(request.prompt_token_ids)
        last_V = np.zeros(vocab_size, bool)
        last_V[list(rules.last)] = True
        self._last_W = token_bits.packed(last_V) if rules.last and not params.ignore_eos else None

    @staticmethod
    def prepare(masks: Iterable[TokenRules]) -> None:
        """Do together the work that the requests' own masks can share, as `TokenMask` describes."""
        prepare(mask._inner for mask in masks if mask._inner is not None)

    def accept(self, token_id: int) -> None:
        ended = self._must_end
        self._recent.append(token_id)
        self._owed, self._room = self._owed - 1, self._room - 1
        if self._inner is not None and not ended:
            self._inner.accept(token_id)

    def allowed(self) -> np.ndarray:
        if self._last_W is not None and self._must_end:
            return self._last_W
        found_W = self._always_W
        if self._inner is not None:
            found_W = self._checked(self._inner.allowed())
            if self._limited:
                found_W = np.bitwise_and(found_W, self._always_W, out=self._found_W)
        ends = self._ended_words()
        if not ends and self._owed <= 0:
            return found_W
        np.copyto(self._found_W, found_W)
        token_bits.Few(ends).remove(self._found_W)
        if self._owed > 0:
            before = self._stops.remove(self._found_W)
            if token_bits.is_empty(self._found_W):
                self._stops.restore(self._found_W, before)
        return self._found_W

    @property
    def walks(self) -> bool:
        return self._inner is None or drafting(self._inner) is not None

    def forced(self) -> Iterable[int]:
        inner = drafting(self._inner)
        return () if inner is None else inner.forced()

    def save(self) -> object:
        inner = drafting(self._inner)
        return self._recent.copy(), self._owed, self._room, None if inner is None else inner.save()

    def restore(self, state: object) -> None:
        recent, self._owed, self._room, saved = cast("tuple[deque[int], int, int, object]", state)
        self._recent = recent.copy()
        if (inner := drafting(self._inner)) is not None:
            inner.restore(saved)

    @property
    def _must_end(self) -> bool:
        """True if the next token is the last one, and the model's rules name it."""
        return self._last_W is not None and self._room == 1

    def _ended_words(self) -> list[int]:
        """Return the tokens that would end a bad word now."""
        if not self._longer:
            return []
        recent = tuple(self._recent)
        near = self._longer.get(recent[-1], ()) if recent else ()
        return [word[-1] for word in near if recent[1 - len(word) :] == word[:-1]]

    def _checked(self, found_W: np.ndarray) -> np.ndarray:
        if found_W.dtype != np.uint32 or found_W.shape != self._always_W.shape:
            raise ContractViolation(
                f"a token mask is uint32 {self._always_W.shape}, got {found_W.dtype} {found_W.shape}."
            )
        return found_W


def constrained(request: Request, vocab_size: int, rules: OutputRules = NO_RULES) -> Request:
    """The request with a mask for all the rules it has, min_tokens and its reasoning's budget among them, and those of
    the model; as it is if it needs no mask."""
    params, thinking = request.params, request.thinking
    if request.speech is not None and request.token_mask is None:
        request = replace(request, token_mask=SpeechMask(request.speech, vocab_size))
    if thinking is not None and (request.token_mask is not None or thinking.budget is not None):
        request = replace(request, thinking=None, token_mask=ThinkingMask(request, thinking, vocab_size))
    ruled = bool(rules.bad_words or (rules.last and not params.ignore_eos))
    if request.token_mask is None and params.allowed_token_ids is None and not params.bad_words and not ruled:
        return request
    if params.min_tokens:
        params = params.replace(min_tokens=0)
    return replace(request, params=params, token_mask=TokenRules(request, vocab_size, rules))


def prepare(masks: Iterable[TokenMask]) -> None:
    """Let masks of one kind do together what they can, before each is asked."""
    kinds: dict[Any, list[TokenMask]] = {}
    for mask in masks:
        kinds.setdefault(type(mask), []).append(mask)
    for kind, those in kinds.items():
        if hasattr(kind, "prepare"):
            with suppress(Exception):  # the mask at fault raises again when it is asked
                kind.prepare(those)


def due(seqs: Mapping[int, Sequence], fail: Fail) -> dict[int, np.ndarray]:
    """Row → what its request's next token may be, for the rows whose requests have masks. `fail` ends a request."""
    masks = {
        row: (seq, seq.request.token_mask)
        for row, seq in seqs.items()
        if seq.request.token_mask is not None and seq.status is not Status.FINISHED
    }
    prepare(mask for _, mask in masks.values())
    found = {row: guarded(partial(_allowed, mask), seq, fail) for row, (seq, mask) in masks.items()}
    return {row: bits_W for row, bits_W in found.items() if bits_W is not None}


def _allowed(mask: TokenMask) -> np.ndarray:
    found_W = mask.allowed()
    if token_bits.is_empty(found_W):
        raise InvalidRequest("it allows no token.")
    return found_W


def accept(seq: Sequence, token: int, fail: Fail) -> None:
    """Advance the request's mask, if it has one, over an emitted token."""
    mask = seq.request.token_mask
    if mask is not None and token >= 0 and seq.status is not Status.FINISHED:
        guarded(lambda: mask.accept(token), seq, fail)


def guarded(action: Callable[[], T], seq: Sequence, fail: Fail) -> T | None:
    """Do what a request's mask is asked for; `fail` ends the request if it cannot."""
    try:
        return action()
    except Exception as error:  # a grammar may fail in any way
        known = isinstance(error, InvalidRequest)  # its words are for the caller
        fail(seq, f"{MASK_FAILED}: {error}" if known else f"{MASK_FAILED}: {type(error).__name__}: {error}")
        return None
