"""Least work of sampling. N rows that sample, V vocabulary."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def sample_cost(rows: int, vocab_size: int) -> Cost:
    """float32 logits read once, an int64 token written per row, one comparison per logit.

    That is greedy choice. Noise and temperature add arithmetic but no bytes (the draw is counter-based, made in place);
    penalties and masks would add theirs, which depends on the requests and not on the step's shape.
    """
    return Cost(rows * (4.0 * vocab_size + 8), float(rows * vocab_size))
