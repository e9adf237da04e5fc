"""The two ways in which a matrix of a product lies in memory: with K along its rows, or not."""

from __future__ import annotations

from torch import Tensor

ByK = tuple[bool, bool]  # whether K runs along the rows of the left matrix, and of the right one


def matrix_shapes(sizes: tuple[int, int, int], by_k: ByK) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of both in memory. sizes: m, n, k."""
    m, n, k = sizes
    return ((m, k) if by_k[0] else (k, m)), ((n, k) if by_k[1] else (k, n))


def as_they_lie(left: Tensor, right: Tensor) -> tuple[ByK, Tensor, Tensor]:
    """Return the ways in which [m, k] and [k, n] lie, and both as memory has them, copied if dense in neither way."""
    by_k = not left.t().is_contiguous(), right.t().is_contiguous()
    return by_k, (left.contiguous() if by_k[0] else left.t()), (right.t() if by_k[1] else right.contiguous())
