"""Trees of drafts: what each of a row's newest tokens sees of the others, in 64 bits a token.

Node 0 is the root, and a parent comes before its children. The keys of a tree's nodes lie in the cache one behind
another in the order of the nodes, from `base` on. This is their place. Their position is that of the text that they
would continue: the base and the number of nodes above them. So two nodes of a tree may have the same position.

A node's bits name the nodes that it sees: those above it, up to the root, and itself. They describe the whole tree. The
bits of a node without its own bit are the bits of its parent. If a node sees the key at place base + j, the number of
nodes above that key's node is the number of the node's bits below bit j.

Legend:
    T  tokens of a step
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NODES = 64  # of a tree, at most


class Tree(NamedTuple):
    """The keys from a base on that the tokens of a step see. They see all keys before it, except those that a window
    hides.

    bits_T: int64, bit j: the token sees the key at place base + j of its row. Its own bit is set, and none above it.
    base_T: int64, the base. A token that sees all keys before its own, as any does without a tree, has its own position
        there, and bits 1.
    """

    bits_T: Tensor
    base_T: Tensor

    @property
    def positions_T(self) -> Tensor:
        return self.base_T + popcount(self.bits_T) - 1


def popcount(bits: Tensor) -> Tensor:
    """Return the number of bits set in each int64."""
    pairs = bits - (bits >> 1 & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + (pairs >> 2 & 0x3333333333333333)
    return ((fours + (fours >> 4) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56


def sight(bits: Tensor, base: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return (seen, position). seen: bool, whether tokens with these bits and bases see the keys at these places.
    position: int64, those of the keys that they see. The shapes broadcast."""
    node = key - base
    own = node.clamp(0, NODES - 1)
    above = bits & ((torch.ones_like(own) << own) - 1)
    seen = (node < 0) | ((node < NODES) & (bits >> own & 1 > 0))
    return seen, torch.where(node < 0, key, base + popcount(above))


def parent(bits: Tensor) -> Tensor:
    """Return the node above each node with these bits (int64); -1 for roots, which have only their own bit."""
    rest = bits ^ (1 << popcount(_filled(bits)) - 1)
    return popcount(_filled(rest)) - 1


def _filled(bits: Tensor) -> Tensor:
    """Set all bits below the highest one."""
    for far in (1, 2, 4, 8, 16, 32):
        bits = bits | bits >> far
    return bits
