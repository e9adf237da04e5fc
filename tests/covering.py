"""Few cases of many in which every pair of values of two parameters occurs. The others are for thorough runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=Sequence[Hashable])


def pairs(case: Sequence[Hashable]) -> set[tuple[Any, ...]]:
    """Return every two places with their values."""
    return set(combinations(enumerate(case), 2))


def covering(allowed: Sequence[Case]) -> list[Case]:
    """Return few of the cases, with every pair that any of them has: always the next that has most new pairs."""
    left, chosen = set[tuple[Any, ...]]().union(*map(pairs, allowed)), list[Case]()
    while left:
        chosen.append(max(allowed, key=lambda each: len(left & pairs(each))))
        left -= pairs(chosen[-1])
    return chosen


def by_pairs(
    *parameters: Sequence[Any],
    where: Callable[..., bool] = lambda *case: True,
    drawn: Callable[..., bool] = lambda *case: True,
) -> list[Any]:
    """Return the product of the values of some parameters, of which those outside a covering design are thorough.

    where: which of the cases there are.
    drawn: which of these the design may have: others are skipped where no GPU is.
    """
    cases = {
        places: [values[n] for values, n in zip(parameters, places, strict=True)]
        for places in product(*(range(len(values)) for values in parameters))
    }
    design = {*covering([places for places, case in cases.items() if where(*case) and drawn(*case)])}
    return [
        pytest.param(*case, marks=() if places in design else pytest.mark.thorough)
        for places, case in cases.items()
        if where(*case)
    ]


def by_values(*parameters: Sequence[Any], turn: int = 0) -> list[Any]:
    """Return the product of the values of some parameters, of which those outside a design that has every value once
    are thorough. Where several files ask the same of what they test, another `turn` in each lets all pairs occur."""
    most = max(map(len, parameters))
    design = {tuple((n + turn * at) % len(values) for at, values in enumerate(parameters)) for n in range(most)}
    return [
        pytest.param(
            *(values[n] for values, n in zip(parameters, places, strict=True)),
            marks=() if places in design else pytest.mark.thorough,
        )
        for places in product(*(range(len(values)) for values in parameters))
    ]
