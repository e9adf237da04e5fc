"""The least work of an embedding lookup."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def embedding_cost(tokens: int, width: int, *, itemsize: float, held: float = 1.0) -> Cost:
    """Count one int32 id and one row read per token, and one row written; there is no arithmetic.

    held: the share of the tokens whose rows are in this part of the table. Others are written and not read.

    Equal ids could share a read. But ids are data and not shape, so each token counts. The rest of the table stays
    untouched.
    """
    return Cost(tokens * (4 + (1 + held) * width * itemsize), 0.0)
