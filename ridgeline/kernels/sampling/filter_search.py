"""The search for the places where rows are cut: the numbers that are known of each, and what a round adds to them.

The legend is that of filter_cuts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.sampling.op import SamplingTables

PLACES = 1 << 24
MANY_ROWS = 85  # up to here a round's 3 KiB a row are 256 KiB at most, which one launch gathers over peer memory
ALL_TIES = 1 << 30  # more than a row has tokens


class Known(NamedTuple):
    """The numbers that are known of each row's cut: int64 [R] each.

    place: the digits found so far; at last the place of the cut. PLACES: the row is not cut.
    tokens, mass: how many tokens are before that place, and their mass.
    goal: the count or mass that those before the cut, and some at it, reach.
    ranked, quota: the place of the cut of top-k, and how many of the tokens there stay.
    own: how many of this rank's tokens at the cut stay.
    """

    place: Tensor
    tokens: Tensor
    mass: Tensor
    goal: Tensor
    ranked: Tensor
    quota: Tensor
    own: Tensor


@dataclass
class Cut:
    """The search for the cuts of all rows, as this rank sees it.

    range_RM2: what all ranks began with, the largest and the least logits of their parts.
    count: this rank's tokens.
    mean_R: where typical-p cuts, the mean distance of a row's tokens from its largest logit.
    told: the numbers of all ranks, int32 [R, N X], of each round so far.
    """

    tables: SamplingTables
    slots_R: Tensor
    range_RM2: Tensor
    rank: int
    ranks: int
    count: int
    size: int
    mean_R: Tensor | None = None
    told: list[Tensor] = field(default_factory=list, init=False)
    places: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    known_DRS: Tensor = field(init=False)
    words_DRX: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, device = len(self.slots_R), self.slots_R.device
        self.known_DRS = torch.empty(self.rounds + 1, rows, len(Known._fields) + 1, dtype=torch.int64, device=device)
        self.words_DRX = torch.zeros(self.rounds, rows, 3 << self.bits, dtype=torch.int32, device=device)

    @property
    def bits(self) -> int:
        """The bits of a digit."""
        return 8 if len(self.slots_R) <= MANY_ROWS else 6

    @property
    def levels(self) -> int:
        """The digits of a place."""
        return 24 // self.bits

    @property
    def rounds(self) -> int:
        return self.levels if self.mean_R is not None else 2 * self.levels - 1

    def level(self, number: int) -> int:
        """Return the digit that a round finds. The first one of top-p behind top-k needs no round."""
        return number if number < self.levels else number - self.levels + 1


def _asked(cut: Cut) -> tuple[Tensor, Tensor]:
    """Return each row's top-k, 0 if it has none, and its top-p; in place of the latter, where it cuts, typical-p."""
    random_R = cut.tables.temperature_S[cut.slots_R] > 0
    if cut.mean_R is not None:
        return torch.zeros_like(cut.slots_R), cut.tables.typical_p_S[cut.slots_R].where(random_R, 1)
    top_k_R = cut.tables.top_k_S[cut.slots_R]
    top_k_R = torch.where(random_R & (top_k_R > 0) & (top_k_R < cut.size), top_k_R, 0)
    return top_k_R, cut.tables.top_p_S[cut.slots_R].where(random_R, 1)


def is_searching(cut: Cut, number: int) -> Tensor:
    """Return the rows of which a round finds a digit: bool [R]."""
    top_k_R, top_p_R = _asked(cut)
    ranked_R, cut_R = top_k_R > 0, top_p_R < 1
    return ranked_R | cut_R if number < cut.levels else ranked_R & cut_R


def note(cut: Cut, number: int, known: Known) -> None:
    for column, value_R in enumerate(known):
        cut.known_DRS[number, :, column] = value_R


def known_before(cut: Cut, number: int) -> Known:
    """Return the numbers that are known of each row's cut before the round `number`."""
    if number == 0:
        zero_R = torch.zeros_like(cut.slots_R)
        place_R = torch.where(is_searching(cut, 0), zero_R, PLACES)
        return Known(place_R, zero_R, zero_R, zero_R, zero_R + PLACES, zero_R, zero_R)
    old = Known(*cut.known_DRS[number - 1, :, : len(Known._fields)].unbind(-1))
    new, searching_R = _found(cut, number - 1, old), is_searching(cut, number - 1)
    return Known(*(torch.where(searching_R, n, o) for n, o in zip(new, old, strict=True)))


def _found(cut: Cut, number: int, old: Known) -> Known:
    """Return the numbers that are known after the round `number`, of rows for which it found a digit."""
    top_k_R, top_p_R = _asked(cut)
    by_count_R = (top_k_R > 0) & (number < cut.levels)
    mass_RNB, count_RNB = _numbers(cut, number)
    mass_RB, count_RB = mass_RNB.sum(1), count_RNB.sum(1)
    goal_R = old.goal
    if number == 0:
        goal_R = torch.where(by_count_R, top_k_R, _share(mass_RB.sum(-1), top_p_R))
    digit_R, count_R, mass_R = _digit(count_RB, mass_RB, by_count_R, goal_R, old.tokens, old.mass)
    place_R = (old.place << cut.bits) + digit_R
    known = old._replace(place=place_R, tokens=count_R, mass=mass_R, goal=goal_R)
    if number not in (cut.levels - 1, 2 * cut.levels - 2):
        return known
    # The cut is found: so many tokens at it stay
    at_R1 = digit_R[:, None]
    here_R, here_mass_R = count_RB.gather(1, at_R1)[:, 0], mass_RB.gather(1, at_R1)[:, 0]
    before_R = count_RNB[:, : cut.rank].sum(1).gather(1, at_R1)[:, 0]
    each_R = here_mass_R // here_R.clamp(min=1)
    needed_R = (goal_R - mass_R + each_R.clamp(min=1) - 1) // each_R.clamp(min=1)
    needed_R = needed_R.clamp(min=1).minimum(here_R.clamp(min=1))
    needed_R = torch.where(place_R == old.ranked, needed_R.minimum(old.quota), needed_R)
    quota_R = torch.where(by_count_R, (goal_R - count_R).minimum(here_R), needed_R)
    own_R = (quota_R - before_R).clamp(min=0)
    if cut.mean_R is not None:
        own_R = torch.full_like(own_R, ALL_TIES)
    known = known._replace(own=own_R)
    if number >= cut.levels or cut.mean_R is not None:
        return known
    # Rows with top-k and top-p begin again with the share of what top-k leaves
    both_R = by_count_R & (top_p_R < 1)
    share_R = _share(mass_R + each_R * quota_R, top_p_R)
    mass_RNB, count_RNB = _numbers(cut, 0)
    zero_R = torch.zeros_like(share_R)
    again = _digit(count_RNB.sum(1), mass_RNB.sum(1), torch.zeros_like(both_R), share_R, zero_R, zero_R)
    return Known(
        torch.where(both_R, again[0], place_R),
        torch.where(both_R, again[1], count_R),
        torch.where(both_R, again[2], mass_R),
        torch.where(both_R, share_R, goal_R),
        torch.where(both_R, place_R, old.ranked),
        quota_R,
        own_R,
    )


def _digit(
    count_RB: Tensor, mass_RB: Tensor, by_count_R: Tensor, goal_R: Tensor, count_R: Tensor, mass_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the digit at which the goal is reached, and the count and mass before it."""
    before_R1 = torch.where(by_count_R, count_R, mass_R)[:, None]
    reached_RB = torch.where(by_count_R[:, None], count_RB, mass_RB).cumsum(-1) + before_R1
    digit_R = (reached_RB < goal_R[:, None]).sum(-1).clamp(max=count_RB.shape[1] - 1)
    before_RB = torch.arange(count_RB.shape[1], device=digit_R.device) < digit_R[:, None]
    return digit_R, count_R + (count_RB * before_RB).sum(-1), mass_R + (mass_RB * before_RB).sum(-1)


def _share(mass_R: Tensor, top_p_R: Tensor) -> Tensor:
    return (mass_R.double() * top_p_R).long().clamp(min=1)


def _numbers(cut: Cut, number: int) -> tuple[Tensor, Tensor]:
    """Return the masses and counts that ranks told in a round: int64 [R, N, B] each."""
    told_RNX = cut.told[number].unflatten(1, (cut.ranks, -1))
    mass_RNB = told_RNX[..., : 2 << cut.bits].contiguous().view(torch.int64)
    return mass_RNB, told_RNX[..., 2 << cut.bits :].long()
