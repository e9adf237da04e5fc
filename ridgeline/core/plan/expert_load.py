"""A count of the tokens that the experts of a model got."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ExpertLoad(NamedTuple):
    """The tokens that every expert got. Layers without experts have no rows.

    Legend:
        L  mixtures, in the order of their layers
        E  experts of the largest mixture; those that a smaller one lacks have 0

    layers: their indices among the model's layers.
    experts: how many experts each has.
    total_LE: int64, since the engine started.
    step_LE: in one recent step, the newest that was looked at; zeros before any was.
    step_tokens: the tokens of that step.
    reach: how many experts had tokens in that step, divided by how many uniform routing would reach.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    total_LE: np.ndarray
    step_LE: np.ndarray
    step_tokens: int = 0
    reach: float = 1.0
