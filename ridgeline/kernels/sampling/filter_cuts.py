"""The place where filters cut a row whose vocabulary ranks divide: found exactly, in a fixed number of rounds.

A token's place is its distance from the row's largest logit, as an integer of 24 bits. The places span 32 bits of
probability (a factor of 2**32), and tokens beyond share the last place: noise spans 28.1 bits, so they are never drawn.
If all logits of a row span less, as at a high temperature, the places span just these. So logits that differ by 2**-24
of the row's range have places of their own at any temperature.

Each round finds the next digit, of 8 bits, of the place of the cut. Every rank sends the number and the mass of its
tokens at each of the 256 values of this digit, and the sums over ranks give the digit. Three rounds find the cut of
top-k, or of top-p. For rows that ask for both two more rounds find that of top-p, whose first digit is in the first
round's numbers. Many rows take digits of 6 bits, and seven rounds, whose messages are a quarter as long.

Masses are integers in units of 2**-38 of the likeliest token, so sums are exact in any order. Of the tokens at the
cut's own place those with the smallest ids stay. A rank knows the number of these on the ranks before it.

Typical-p is the same search once more, among the tokens that stayed and by their distances from the mean (typical.py).

Legend:
    R  rows
    U  tokens of this rank's part of the vocabulary, padding included
    N  ranks
    J  the largest and the least logits of each of a rank's tiles
    M  tiles of all ranks
    B  values of a digit
    S  numbers that are known of a row's cut, see `filter_search.Known`
    D  the rounds, and one more
    X  words that a rank tells in a round: B masses of 64 bits, then B counts of 32
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.filter_search import PLACES, Cut, is_searching, known_before, note
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.parts import tables_of
from ridgeline.kernels.sampling.torch_ops import ADJUSTING, adjusted

PER_BIT = PLACES >> 5  # places of a bit of probability
UNIT = 2.0**38
LOG2E = 1.4426950408889634
LEAST = -3.4e38  # only -inf, the logit of forbidden tokens, is less
COLDEST = 1e-30


def cut_begin(
    logits_RU: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return this rank's logits, adjusted as `op.sample_reference` does, and float32 [R, J] with their largest and
    least ones.

    The tokens are `first` … first + count - 1; columns beyond them mean nothing. Forbidden tokens, and scores that are
    not numbers, do not count.
    """
    own_RU = logits_RU[:, :count]
    if count and features & ADJUSTING:
        own_RU = adjusted(own_RU, tables_of(tables, first, count), slots_R, position_R, features)
    x_RU = torch.nn.functional.pad(own_RU.float(), (0, 1), value=-torch.inf)  # something, where there are no tokens
    counts_RU = x_RU >= LEAST
    return own_RU, torch.stack((x_RU.where(counts_RU, LEAST).amax(-1), x_RU.where(counts_RU, -LEAST).amin(-1)), -1)


def cut_round(source_RU: Tensor, cut: Cut, number: int) -> Tensor:
    """Return this rank's words of the round `number`, once `cut.told` has the numbers of the rounds before: int32
    [R, X].

    A token counts if its place begins with the digits that are known of the cut.
    """
    words_RX, bits = cut.words_DRX[number], cut.bits
    known = known_before(cut, number)
    note(cut, number, known)
    place_RU, mass_RU = places(source_RU, cut)
    shift = bits * (cut.levels - cut.level(number))
    begins_RU = place_RU >> shift == torch.where(is_searching(cut, number), known.place, -1)[:, None]
    [token_n] = begins_RU.flatten().nonzero(as_tuple=True)
    digit_n = (place_RU.flatten()[token_n] >> shift - bits) & (1 << bits) - 1
    at_n = (token_n // max(place_RU.shape[1], 1) << bits) + digit_n
    for words_RY, number_n in (
        (words_RX[:, : 2 << bits].view(torch.int64), mass_RU.flatten()[token_n]),
        (words_RX[:, 2 << bits :], torch.ones_like(at_n)),
    ):
        sum_Y = torch.zeros(words_RY.numel(), dtype=torch.int64, device=at_n.device).index_add_(0, at_n, number_n)
        words_RY.copy_(sum_Y.view_as(words_RY))
    return words_RX


def cut_end(source_RU: Tensor, cut: Cut) -> Tensor:
    """Return the logits with -inf for tokens that top-k, top-p and min-p remove, or with `cut.mean_R` typical-p.

    All rounds' numbers are in `cut.told`. Rows of NaN and greedy rows stay as they are. Columns beyond this rank's
    tokens mean nothing.
    """
    known = known_before(cut, cut.rounds)
    place_RU, mass_RU = places(source_RU, cut)
    cut_R1 = known.place[:, None].int()
    tied_RU = place_RU == cut_R1
    stays_RU = (place_RU < cut_R1) | (tied_RU & (tied_RU.cumsum(-1) <= known.own[:, None]))
    if cut.mean_R is None:
        least_R = (cut.tables.min_p_S[cut.slots_R] * UNIT).long()
        stays_RU &= mass_RU >= least_R[:, None]
    stays_RU |= source_RU.isnan() | (cut.tables.temperature_S[cut.slots_R] <= 0)[:, None]
    return source_RU.masked_fill(~stays_RU, -torch.inf)


def moments(source_RU: Tensor, cut: Cut) -> Tensor:
    """Return the mass of this rank's tokens, and their distances weighted by mass: float32 [R, 2]."""
    away_RU = distances(source_RU, cut)
    mass_RU = torch.exp2(-away_RU * bits_per_logit(cut.tables.temperature_S[cut.slots_R])[:, None])
    counts_RU = mass_RU > 0  # scores that are not numbers do not
    return torch.stack((mass_RU.where(counts_RU, 0).sum(-1), (mass_RU * away_RU).where(counts_RU, 0).sum(-1)), -1)


def mean(told_RX: Tensor) -> Tensor:
    """Return the rows' mean distances from the moments of all ranks."""
    mass_R, weighted_R = told_RX.unflatten(1, (-1, 2)).sum(1).unbind(-1)
    return weighted_R / mass_R


def distances(source_RU: Tensor, cut: Cut) -> Tensor:
    """Return the distances of tokens from their row's largest logit, which may be infinite."""
    x_RU, top_R1 = source_RU.float(), cut.range_RM2[..., 0].amax(-1, keepdim=True)
    return torch.where(x_RU == top_R1, 0, top_R1 - x_RU)


def bits_per_logit(temperature_R: Tensor) -> Tensor:
    """Return the factor that turns logits into binary logarithms of probabilities; 1 for greedy rows."""
    return torch.where(temperature_R > 0, LOG2E / temperature_R.clamp(min=COLDEST), 1)


def places(source_RU: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the tokens' places, PLACES for forbidden ones, and their masses: int32 and int64. They are computed
    once."""
    if cut.places is not None:
        return cut.places
    away_RU = distances(source_RU, cut)
    scale_R1 = bits_per_logit(cut.tables.temperature_S[cut.slots_R])[:, None]
    mass_RU = (torch.exp2(-away_RU * scale_R1) * UNIT).long()
    if cut.mean_R is not None:
        away_RU = (away_RU - cut.mean_R[:, None]).abs()
    width_R1 = (cut.range_RM2[..., 0].amax(-1) - cut.range_RM2[..., 1].amin(-1)).clamp(min=1e-30)[:, None]
    units_R1 = torch.where(width_R1 * scale_R1 < 32, (PLACES - 1) / width_R1, PER_BIT * scale_R1)
    place_RU = (away_RU * units_R1).clamp(max=PLACES - 1).int()
    cut.places = torch.where(source_RU.float() >= LEAST, place_RU, PLACES), mass_RU
    return cut.places
