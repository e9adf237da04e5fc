"""Least work of an embedding lookup. T tokens, M row width."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def embedding_cost(tokens: int, width: int, *, itemsize: float) -> Cost:
    """One int32 id and one row read per token, one row written; no arithmetic.

    Equal ids could share a read; ids are data, not shape, so each token counts. The rest of the table stays untouched.
    """
    return Cost(tokens * (4 + 2 * width * itemsize), 0.0)
