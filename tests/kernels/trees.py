"""Random trees of drafts, as the parent of each node, and their bits by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence


def drawn_parents(draw: random.Random, nodes: int, wide: float = 0.5) -> tuple[int, ...]:
    """Draw a parent for each node among those before it. wide: the probability that it is not the one before."""
    return (-1, *(draw.randrange(node) if draw.random() < wide else node - 1 for node in range(1, nodes)))


def bits_of(parents: Sequence[int]) -> list[int]:
    """The bits of each node, without a sign."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if node else 0) | 1 << node)
    return found


def depth_of(parents: Sequence[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


def signed(bits: int) -> int:
    """The same bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits
