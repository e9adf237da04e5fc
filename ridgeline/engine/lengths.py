"""Lengths of outputs, learned while requests end: a quantile for each tenant and class of prompt.

A quantile is moved by each output: up if that was longer, down if it was shorter, in proportion to itself (stochastic
approximation of a quantile: Robbins and Monro, 1951). A class is a power of two of the prompt's length. A tenant's
class that has seen few outputs uses its class of all tenants.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp

from ridgeline.core.plan.request import Request

QUANTILE = 0.5  # as many outputs are longer as are shorter
FIRST_STEP, LEAST_STEP = 1.0, 0.05  # of the logarithm, for the first output and in the long run
ASSUMED = 256.0  # tokens, before any output has ended
ENOUGH = 4  # outputs after which a tenant's own class is used
MOST_CLASSES = 4096


class Lengths:
    """ended, error: the outputs that ended, and the sum of the tokens by which their predictions were wrong."""

    def __init__(self) -> None:
        self.ended, self.error = 0, 0.0
        self._classes: OrderedDict[tuple[str | None, int], tuple[float, int]] = OrderedDict()

    def predicted(self, request: Request) -> int:
        """Return the tokens that a request will probably write, at most as many as it may."""
        length, most = len(request.prompt_token_ids), request.max_total_tokens
        for name in (request.owner, length.bit_length()), (None, length.bit_length()):
            quantile, seen = self._classes.get(name, (ASSUMED, 0))
            if seen >= ENOUGH:
                break
        return max(0, min(round(quantile), most - length))

    def note(self, request: Request, predicted: int, length: int) -> None:
        """Learn that an output ended after `length` tokens, for which so many had been predicted."""
        self.ended += 1
        self.error += abs(length - predicted)
        size = len(request.prompt_token_ids).bit_length()
        for name in (request.owner, size), (None, size):
            quantile, seen = self._classes.pop(name, (ASSUMED, 0))
            step = max(LEAST_STEP, FIRST_STEP / (1 + seen / ENOUGH))
            quantile *= exp(2 * step * (QUANTILE if length > quantile else QUANTILE - 1))
            self._classes[name] = max(1.0, quantile), seen + 1
        while len(self._classes) > MOST_CLASSES:
            self._classes.popitem(last=False)
