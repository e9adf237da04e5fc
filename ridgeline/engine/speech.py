"""The rules of a recogniser's output as masks: those of Whisper's own decoding (`decoding.py` of openai/whisper), which
transformers has as logits processors. The one that depends on scores is applied where these are
(`worker/speech.py`)."""

from __future__ import annotations

import numpy as np

from ridgeline.core.plan import token_bits
from ridgeline.core.plan.sounds import SpeechRules


class SpeechMask:
    """A `TokenMask`.

    Times come in pairs, a segment's end and the next one's begin, and never fall. A segment's end that follows text is
    followed by the next begin or by the end of all.
    """

    def __init__(self, rules: SpeechRules, vocab_size: int) -> None:
        self._rules = rules
        self._allowed_V = np.ones(vocab_size, np.bool_)
        self._allowed_V[[*rules.suppressed]] = False
        if rules.timestamps:
            self._allowed_V[rules.no_timestamps] = False
        self._always_W = token_bits.packed(self._allowed_V)
        self._tokens: list[int] = []
        self._latest = 0  # the last time

    def accept(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if self._is_time(token_id):
            self._latest = token_id

    def allowed(self) -> np.ndarray:
        """Return the packed set of tokens that may come next: uint32 [W]."""
        rules, first = self._rules, not self._tokens
        if not rules.timestamps and not (first and rules.not_first):
            return self._always_W
        allowed_V = self._allowed_V.copy()
        if first:
            allowed_V[[*rules.not_first]] = False
        if rules.timestamps:
            self._time(allowed_V, first=first)
        return token_bits.packed(allowed_V)

    def _time(self, allowed_V: np.ndarray, *, first: bool) -> None:
        rules, tokens = self._rules, self._tokens
        begin = rules.timestamps
        ended = not first and self._is_time(tokens[-1])
        paired = len(tokens) < 2 or self._is_time(tokens[-2])
        if ended and paired:
            allowed_V[begin:] = False
        elif ended:
            allowed_V[: rules.end] = False
        if self._latest:
            allowed_V[begin : self._latest + (not ended or paired)] = False
        if first:
            allowed_V[:begin] = False
            if rules.latest is not None:
                allowed_V[begin + rules.latest + 1 :] = False

    def _is_time(self, token_id: int) -> bool:
        return token_id >= self._rules.timestamps > 0
