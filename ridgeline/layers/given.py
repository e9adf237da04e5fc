"""Vectors and positions that are given for some tokens of a step: as many as there are, or in memory of a fixed size
that a graph reads.

Legend:
    T  tokens of the step
    t  those of them whose vectors or positions are given
    M  model width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class GivenVectors(Protocol):
    """Vectors that take the place of some tokens' rows of the embedding table.

    deep: what is added behind the first layers, one tensor for each.
    """

    @property
    def deep(self) -> Sequence[Tensor]: ...

    def placed(self, x_TM: Tensor, *, blank: bool = False) -> Tensor:
        """Return the rows with the vectors in their places; blank: with zeros there."""

    def added(self, x_TM: Tensor, index: int) -> Tensor:
        """Return the rows with what is added behind layer `index`."""

    def marked(self, ids_T: Tensor, value: int) -> Tensor:
        """Return the tokens' ids with `value` in the places of vectors."""


class GivenRows(NamedTuple):
    """A `GivenVectors`: row t of token_t is x_tM[t].

    token_t: places among the step's tokens, int64 [t].
    x_tM: [t, M], of any floating-point type.
    deep: [t, M] each.
    """

    token_t: Tensor
    x_tM: Tensor
    deep: Sequence[Tensor] = ()

    def placed(self, x_TM: Tensor, *, blank: bool = False) -> Tensor:
        x_tM = torch.zeros_like(self.x_tM) if blank else self.x_tM
        return x_TM.index_copy(0, self.token_t, x_tM.to(x_TM.dtype))

    def added(self, x_TM: Tensor, index: int) -> Tensor:
        return x_TM.index_add(0, self.token_t, self.deep[index].to(x_TM.dtype))

    def marked(self, ids_T: Tensor, value: int) -> Tensor:
        return ids_T.index_fill(0, self.token_t, value)

    def among(self, own_T: Tensor, tokens: int) -> MaskedRows:
        """Return the vectors of some of the step's so many tokens: those with these numbers, int64 [own]. The host
        waits for nothing."""
        place_T = own_T.new_full((tokens,), -1)
        place_T[self.token_t] = torch.arange(len(self.token_t), device=own_T.device)
        place_T = place_T[own_T]
        row_T = place_T.clamp(min=0)
        return MaskedRows(place_T >= 0, self.x_tM[row_T], [each_tM[row_T] for each_tM in self.deep])


class MaskedRows(NamedTuple):
    """A `GivenVectors` with a row for every token. Rows where given_T is False mean nothing.

    given_T: bool.
    x_TM: [T, M] in the model's dtype.
    deep: [T, M] each.
    """

    given_T: Tensor
    x_TM: Tensor
    deep: Sequence[Tensor] = ()

    def placed(self, x_TM: Tensor, *, blank: bool = False) -> Tensor:
        given_T1 = self.given_T[:, None]
        return x_TM.masked_fill(given_T1, 0) if blank else torch.where(given_T1, self.x_TM.to(x_TM.dtype), x_TM)

    def added(self, x_TM: Tensor, index: int) -> Tensor:
        return torch.where(self.given_T[:, None], x_TM + self.deep[index].to(x_TM.dtype), x_TM)

    def marked(self, ids_T: Tensor, value: int) -> Tensor:
        return ids_T.masked_fill(self.given_T, value)


class GivenPositions(Protocol):
    """Positions of some tokens on three axes."""

    def placed(self, positions_T: Tensor) -> Tensor:
        """Return the positions of all tokens on three axes, [3, T]. Those that are not given are alike on all."""


class GivenPlaces(NamedTuple):
    """`GivenPositions` of so many tokens. token_t: places among the step's tokens, int64. places_3t: int64."""

    token_t: Tensor
    places_3t: Tensor

    def placed(self, positions_T: Tensor) -> Tensor:
        places_3T = positions_T.expand(3, -1).clone()
        places_3T[:, self.token_t] = self.places_3t.to(places_3T.dtype)
        return places_3T


class MaskedPlaces(NamedTuple):
    """`GivenPositions` with a column for every token. places_3T: int64; -1: not given."""

    places_3T: Tensor

    def placed(self, positions_T: Tensor) -> Tensor:
        return torch.where(self.places_3T < 0, positions_T.to(self.places_3T.dtype), self.places_3T)
