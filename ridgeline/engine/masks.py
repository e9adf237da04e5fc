"""Token masks, which are somebody else's code: whatever they do, only their own request may suffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.request import MASK_FAILED
from ridgeline.engine.sequence import Sequence, Status

T = TypeVar("T")

Fail = Callable[[Sequence, str], None]


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
