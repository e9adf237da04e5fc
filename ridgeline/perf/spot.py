"""Spot devices beside those on demand: a lower price, and interruptions.

An interruption of any device ends the engine that runs on it; after `lost` seconds another one serves. So an engine on
n devices, each interrupted r times an hour on average, serves in the share

    1 / (1 + n · r · lost / 3600)

of the time (a renewal process: a run of 3600 / (n r) seconds on average, then a pause). A request that runs when the
notice comes is not lost if it ends within the notice (`--shutdown-timeout`); the rest starts over elsewhere, which is
`repeated` seconds of work for each interruption.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class SpotTerms:
    """The terms. price: of a device for an hour. interruptions: of a device in an hour, on average. lost: seconds from
    one to serving again. notice: seconds between the notice and the end."""

    price: float
    interruptions: float
    lost: float = 300.0
    notice: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.price < inf:
            raise InvalidConfig(f"spot price must be above 0, got {self.price!r}.")
        for name in ("interruptions", "lost", "notice"):
            if not 0 <= getattr(self, name) < inf:
                raise InvalidConfig(f"spot {name} must be at least 0, got {getattr(self, name)!r}.")


class Spot(NamedTuple):
    """The cost of spot devices. serving: the share of time in which they serve. repeated: seconds of work that an
    interruption makes start over. cost: of a million output tokens. on_demand: the same. pays_below: interruptions of a
    device in an hour below which spot is cheaper (0: never)."""

    serving: float
    repeated: float
    cost: float
    on_demand: float
    pays_below: float

    @property
    def saving(self) -> float:
        return 1 - self.cost / self.on_demand


def compared(terms: SpotTerms, *, price: float, devices: int, tokens_per_second: float, request: float) -> Spot:
    """Return spot beside on-demand devices of that price. request: seconds that one takes; half of it is done, on
    average, when the notice comes."""
    repeated = 0.0 if request <= terms.notice else request / 2
    pause = terms.lost + repeated
    serving = 1 / (1 + devices * terms.interruptions * pause / 3600)
    on_demand = price * devices / 3600 / tokens_per_second * 1e6
    cost = terms.price * devices / 3600 / (tokens_per_second * serving) * 1e6
    pays_below = max(0.0, (price / terms.price - 1) * 3600 / (devices * pause)) if pause else inf
    return Spot(serving, repeated, cost, on_demand, pays_below)
