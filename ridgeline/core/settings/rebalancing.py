"""Experts that change ranks while an engine runs: what a user may ask of that, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig

REDUNDANT = "num_redundant_experts"
DEFAULTS = {"window_size": 1000, "step_interval": 3000, REDUNDANT: 0}  # as vLLM has them
MOST = 4  # slots that change between two steps, of all ranks together: each takes time, and memory for a matrix
# What vLLM has beside these: the balance is a metric, and matrices always move between steps
WITHOUT_EFFECT = ("log_balancedness", "log_balancedness_interval", "use_async", "policy", "communicator")


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """A look at the experts' load after every `step_interval` steps, by the tokens of the newest `window_size`."""

    window_size: int
    step_interval: int


class Rebalanced(NamedTuple):
    """The outcome of such looks so far.

    looks: how often the load was looked at.
    moves: matrices' places that changed, each of one expert in one layer.
    copied: bytes that ranks got for them.
    before, after: the tokens of the busiest rank ÷ their mean by the newest look, mean of all layers: as experts lay
        then, and as they lie once its moves are done. 1 is best.
    """

    looks: int = 0
    moves: int = 0
    copied: int = 0
    before: float = 1.0
    after: float = 1.0

    def plus(self, earlier: Rebalanced) -> Rebalanced:
        """Return the counts of both, and the newest balance."""
        looks, moves, copied = (own + other for own, other in zip(self[:3], earlier[:3], strict=True))
        return self._replace(looks=looks, moves=moves, copied=copied)


def read_eplb(given: object) -> tuple[Rebalancing, int | None]:
    """Return the settings of an `eplb_config`, and its number of redundant experts if it has one. Raise
    InvalidConfig."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidConfig(
            f'eplb_config must be an object, as {{"window_size": 1000, "step_interval": 3000}}, got {given!r}.'
        )
    values = dict(given or {})
    for name in values:
        if name not in DEFAULTS and name not in WITHOUT_EFFECT:
            raise InvalidConfig(f"eplb_config has no {name!r}; it has {', '.join(DEFAULTS)}.")
    for name in DEFAULTS:
        value, least = values.get(name, DEFAULTS[name]), 0 if name == REDUNDANT else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidConfig(f"{name} of eplb_config is {value!r}; give a whole number from {least}.")
    sizes = {name: values.get(name, DEFAULTS[name]) for name in ("window_size", "step_interval")}
    return Rebalancing(**sizes), values.get(REDUNDANT)
