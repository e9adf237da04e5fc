"""The exchange of tokens between ranks that have tokens of their own and divide the experts: every token is sent to the
ranks that hold experts of its choice (dispatch), and these send back the weighted sum over their experts (combine).

Shapes are fixed by a capacity, the most tokens that a rank can have in the step. A token of rank r that is the t-th
there lies at place r · capacity + t wherever it arrives. So ranks exchange no counts, only the numbers in tensors
depend on data, and a token's place does not depend on the tokens beside it. No token is dropped.

A rank without tokens takes part too, since other ranks may send it theirs.

Each way can be taken apart into sending and receiving (as pplx-kernels does), so that work which does not need what
comes runs between them. The results have the same bits.

Legend:
    T  this rank's tokens
    C  the capacity
    N  places: all ranks' capacities
    M  model width
    K  experts of a token
    R  ranks
    B  bytes of a message
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.kernels.gemm.route.op import Routes


class Arrived(NamedTuple):
    """The work of one rank.

    x_NM: the tokens. Rows of places without a token for this rank are undefined.
    expert_NK: int32, the number of each choice among this rank's experts, or `held` if the expert is another rank's.
    weight_NK: float32.
    sent_TK: int32, the choices of this rank's own tokens, as they were dispatched.
    held: how many experts a rank holds.
    """

    x_NM: Tensor
    expert_NK: Tensor
    weight_NK: Tensor
    sent_TK: Tensor
    held: int


class Exchange(Protocol):
    """The ranks, as one of them sees them. All dispatch and combine in turn, and equally often, whether at once or in
    two parts.

    capacity: the most tokens of a rank. It is the same on all ranks, and is set before a step.
    """

    rank: int
    size: int
    capacity: int

    def smallest(self, value: int) -> int:
        """Return the smallest value that a rank has."""

    def dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Arrived:
        """Send this rank's tokens to their experts, and return what came from all ranks, this one included.

        expert_TK: int32, rank · held + the expert's number there; size · held for a token that goes nowhere.
        """

    def begin_dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Dispatched:
        """Send this rank's tokens as `dispatch` does. Return a function that waits for what comes and returns it. It is
        called once, before the exchange is used again."""

    def combine(self, y_NM: Tensor, arrived: Arrived, add_TM: Tensor | None = None) -> Tensor:
        """Send results back to where their tokens came from. Return this rank's: the sum of all ranks' in the order of
        ranks, plus `add_TM`, in float32 and rounded once: [T, M].

        y_NM: for each place the weighted sum over this rank's experts. Other places are undefined.
        """

    def begin_combine(self, y_NM: Tensor, arrived: Arrived) -> Combined:
        """Send results back as `combine` does. Return a function that waits for this rank's and returns their sums plus
        what it is given. It is called once, before the exchange is used again."""

    def hides(self) -> bool:
        """Return True if work beside the experts had better run between the parts of a combine."""

    def in_one_launch(self, x_TM: Tensor, routes: Routes, weights: Stacks, gate: str) -> Combined | None:
        """Return a function that dispatches, multiplies and combines in one launch, if there is one and it is faster,
        else None. All ranks get the same answer.

        routes: those of this rank's tokens to the experts of all ranks, in order.
        """


Stacks = tuple[Tensor, Tensor]  # gates and ups, and downs, of this rank's experts
Dispatched = Callable[[], Arrived]
Combined = Callable[[Tensor | None], Tensor]


class Swaps(Protocol):
    """Ranks that can swap tensors."""

    rank: int
    size: int

    def smallest(self, value: int) -> int:
        """Return the smallest value that a rank has."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send entry r of the first dimension to rank r. Return a tensor whose entry r came from rank r."""

    def begin_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """Send as `all_to_all` does, and return a function that waits for what comes and returns it."""


class SwapExchange:
    """The reference: one all-to-all each way, with a capacity of rows for each pair of ranks."""

    def __init__(self, ranks: Swaps, capacity: int = 0) -> None:
        self.rank, self.size, self.capacity, self._ranks = ranks.rank, ranks.size, capacity, ranks

    def smallest(self, value: int) -> int:
        return self._ranks.smallest(value)

    def hides(self) -> bool:
        return self.size > 1

    def in_one_launch(self, x_TM: Tensor, routes: Routes, weights: Stacks, gate: str) -> Combined | None:
        return None

    def dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Arrived:
        return self.begin_dispatch(x_TM, expert_TK, weight_TK, held)()

    def begin_dispatch(self, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Dispatched:
        (tokens, width), used = x_TM.shape, expert_TK.shape[1]
        check_tokens(tokens, self.capacity)
        first_R = held * torch.arange(self.size, dtype=torch.int32, device=x_TM.device)
        expert_RTK = expert_TK.int() - first_R[:, None, None]
        expert_RTK = torch.where((expert_RTK >= 0) & (expert_RTK < held), expert_RTK, held)
        x_RTM, weight_RTK = (each.expand(self.size, -1, -1) for each in (x_TM, weight_TK))
        # One message holds all, since each costs a latency; what has larger numbers comes first, for their alignment
        parts = [part.contiguous().view(torch.uint8) for part in (expert_RTK, weight_RTK, x_RTM)]
        sizes = [part.shape[-1] for part in parts]
        sent_RCB = parts[0].new_zeros(self.size, self.capacity, sum(sizes))
        sent_RCB[:, :tokens] = torch.cat(parts, -1)
        sent_RCB[:, tokens:, : sizes[0]] = first_R.new_full((used,), held).view(torch.uint8)
        coming = self._ranks.begin_all_to_all(sent_RCB)

        def came() -> Arrived:
            expert_NB, weight_NB, x_NB = (part.contiguous() for part in coming().flatten(0, 1).split(sizes, -1))
            return Arrived(
                x_NB.view(x_TM.dtype).view(-1, width),
                expert_NB.view(torch.int32).view(-1, used),
                weight_NB.view(torch.float32).view(-1, used),
                expert_TK,
                held,
            )

        return came

    def combine(self, y_NM: Tensor, arrived: Arrived, add_TM: Tensor | None = None) -> Tensor:
        return self.begin_combine(y_NM, arrived)(add_TM)

    def begin_combine(self, y_NM: Tensor, arrived: Arrived) -> Combined:
        coming = self._ranks.begin_all_to_all(y_NM.unflatten(0, (self.size, self.capacity)))
        rank_TK, tokens = arrived.sent_TK // arrived.held, len(arrived.sent_TK)

        def added(add_TM: Tensor | None) -> Tensor:
            y_RCM = coming()
            y_TM = y_RCM.new_zeros(tokens, y_RCM.shape[-1], dtype=torch.float32)
            for rank in range(self.size):
                asked_T1 = (rank_TK == rank).any(1, keepdim=True)
                y_TM = y_TM + torch.where(asked_T1, y_RCM[rank, :tokens].float(), 0)
            return (y_TM if add_TM is None else y_TM + add_TM.float()).to(y_NM.dtype)

        return added


def check_tokens(tokens: int, capacity: int) -> None:
    """Raise ValueError for more tokens than an exchange has places for."""
    if tokens > capacity:
        raise ValueError(f"{tokens} tokens are more than the exchange's capacity of {capacity}")
