"""The least work of experts' products.

Legend:
    P  pairs of a token and one of its experts
    F  an expert's inner width
"""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.small.activation.cost import activation_cost


def touched(tokens: float, experts: int, used: int, reach: float = 1.0) -> float:
    """Return the mean number of experts that `tokens` tokens reach if each chooses `used` different ones uniformly,
    times `reach`. It is at least one token's number of experts, and at most the number of all."""
    if not tokens:
        return 0.0
    uniform = experts * (1 - (1 - used / experts) ** tokens)
    return min(float(experts), max(float(min(used, experts)), reach * uniform))


def grouped_gate_up_cost(
    tokens: int,
    width: int,
    inner: int,
    *,
    used: float,
    reached: float,
    kind: str,
    itemsize: float,
    weight_itemsize: float | None = None,
    bias: bool = False,
) -> Cost:
    """Count the two matrices of each reached expert and each token's row as read once, and [P, F] as written once.
    Experts without a gate have one matrix.

    used: how many pairs a token makes. reached: how many experts have tokens.
    """
    pairs, gated = tokens * used, kind not in UNGATED
    outputs = (1 + gated) * inner
    stored = reached * outputs * ((weight_itemsize or itemsize) * width + itemsize * bias)
    moved = itemsize * (tokens * width + pairs * inner) + 4 * pairs  # an int32 tells the token of each pair
    gate = activation_cost(pairs, inner, kind=kind, itemsize=itemsize, gated=gated).flops
    return Cost(stored + moved, pairs * outputs * (2.0 * width + bias) + gate)


def grouped_down_cost(
    tokens: int,
    inner: int,
    width: int,
    *,
    used: float,
    reached: float,
    itemsize: float,
    weight_itemsize: float | None = None,
    bias: bool = False,
    add: bool = False,
) -> Cost:
    """Count the matrix of each reached expert and [P, F] as read once, and each token's row as written once.

    used: how many pairs a token makes. reached: how many experts have tokens.
    add: a row for each token is read and added.
    """
    pairs = tokens * used
    stored = reached * width * ((weight_itemsize or itemsize) * inner + itemsize * bias)
    moved = itemsize * (pairs * inner + tokens * width * (2 if add else 1)) + 8 * pairs  # each pair's place and weight
    return Cost(stored + moved, pairs * width * (2.0 * inner + bias + 2) + tokens * width * add)
