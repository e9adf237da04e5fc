"""The least work of sampling."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def sample_cost(rows: int, vocab_size: int) -> Cost:
    """Count float32 logits as read once, an int64 token per row as written, and one comparison per logit.

    That is greedy choice. Noise and temperature add arithmetic but no bytes (the draw is counter-based, made in place).
    Penalties and masks would add their own bytes, but these depend on the requests and not on the step's shape.
    """
    return Cost(rows * (4.0 * vocab_size + 8), float(rows * vocab_size))


def noised_cost(rows: int, vocab_size: int) -> Cost:
    """Count float32 logits as read once, and as many numbers as written."""
    return Cost(rows * 8.0 * vocab_size, float(rows * vocab_size))


def best_of_parts_cost(rows: int, ranks: int) -> Cost:
    """Count a token and a score of 4 bytes each of every rank as read, and an int64 token as written."""
    return Cost(rows * (8.0 * ranks + 8), float(rows * ranks))
