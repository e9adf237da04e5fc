"""Drafts that a benchmark forces to be right with a given probability are right as if each were drawn alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline_bench.scripts.verified_steps import coins

ROUNDS, SLOTS, PLACES = 2, 16, 8_000


def coins_RSP() -> Tensor:
    """Return the numbers of neighbouring places, slots and rounds. [R, S, P]"""
    place_P = torch.arange(1, 1 + PLACES)
    slots = [torch.full_like(place_P, slot, dtype=torch.int32) for slot in range(SLOTS)]
    rounds = [torch.tensor(salt) for salt in range(ROUNDS)]
    return torch.stack([torch.stack([coins(place_P, slot_P, salt) for slot_P in slots]) for salt in rounds])


def tokens_of_rows(right: list[bool], drafts: int) -> float:
    """Return the mean tokens of a row, where each row verifies the drafts behind the last token of the one before."""
    rows, at = 0, 0
    while at + drafts < len(right):
        accepted = next((each for each in range(drafts) if not right[at + each]), drafts)
        rows, at = rows + 1, at + accepted + 1
    return at / rows


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_forced_drafts_are_right_as_often_and_for_as_long_as_independent_ones(share: float) -> None:
    right_RSP = coins_RSP() < round(1000 * share)
    assert right_RSP.float().mean().item() == pytest.approx(share, rel=0.02)
    places = right_RSP.flatten().tolist()
    for drafts in (1, 3, 5):
        expected = sum(share**accepted for accepted in range(drafts + 1))
        assert tokens_of_rows(places, drafts) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_forced_drafts_of_neighbouring_places_slots_and_rounds_are_independent(share: float) -> None:
    right_RSP = coins_RSP() < round(1000 * share)
    pairs = [(right_RSP[..., :-lag], right_RSP[..., lag:]) for lag in range(1, 10)]
    pairs += [(right_RSP[:, :-1], right_RSP[:, 1:]), (right_RSP[:-1], right_RSP[1:])]
    for one, other in pairs:
        assert (one & other).float().mean().item() == pytest.approx(share * share, rel=0.02)


def test_forced_drafts_of_a_share_of_none_or_of_all_are_all_wrong_or_all_right() -> None:
    assert [each.item() for each in coins_RSP().aminmax()] == [0, 999]
