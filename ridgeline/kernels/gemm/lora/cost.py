"""The least work of adapters' products."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.kernels.base.cost import Cost


def lora_cost(
    tokens: Sequence[int], ranks: Sequence[int], inputs: int, parts: Sequence[int], *, itemsize: float
) -> Cost:
    """Count, for each adapter that has tokens, its matrices once, its tokens' x once, and their y read and written.
    Tokens without an adapter cost nothing. What passes between the two products stays on the chip.

    tokens, ranks: of each adapter. parts: the outputs of each fused projection.
    """
    outputs, total = sum(parts), Cost(0.0, 0.0)
    for count, rank in zip(tokens, ranks, strict=True):
        if count and rank:
            numbers = rank * (inputs * len(parts) + outputs) + count * (inputs + 2 * outputs)
            total += Cost(itemsize * numbers, 2.0 * count * rank * (inputs * len(parts) + outputs))
    return total
