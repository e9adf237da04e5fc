"""Requests for engines that give all of a batch one length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

PADDED_TOKENS = 64 * 2048  # in one call; more would not fit beside an 8B model

Prompts = Sequence[Sequence[int]]


def in_batches(
    prompts: Prompts, max_tokens: Sequence[int], run: Callable[[Prompts, int], int], most: int = sys.maxsize
) -> list[int]:
    """Call `run` (prompts, new tokens → new tokens of each) for requests sorted by length, in batches that fit, of
    `most` requests.

    A batch runs as long as its longest request, and each request's own tokens are counted.
    """
    order = sorted(range(len(prompts)), key=lambda i: max_tokens[i])
    counts = [0] * len(prompts)
    for batch in _batches(order, prompts, max_tokens, most):
        new = run([prompts[i] for i in batch], max(max_tokens[i] for i in batch))
        for i in batch:
            counts[i] = min(new, max_tokens[i])
    return counts


def _batches(order: list[int], prompts: Prompts, max_tokens: Sequence[int], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in order:
        longest = max(len(prompts[j]) + max_tokens[j] for j in [*batch, i])
        if batch and (longest * (len(batch) + 1) > PADDED_TOKENS or len(batch) == most):
            yield batch
            batch = []
        batch.append(i)
    yield batch
