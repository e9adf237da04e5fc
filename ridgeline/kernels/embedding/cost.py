"""The least work of an embedding lookup."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def embedding_cost(tokens: int, width: int, *, itemsize: float) -> Cost:
    """Count one int32 id and one row read per token, and one row written; there is no arithmetic.

    Equal ids could share a read. But ids are data and not shape, so each token counts. The rest of the table stays
    untouched.
    """
    return Cost(tokens * (4 + 2 * width * itemsize), 0.0)
