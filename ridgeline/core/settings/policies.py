"""Settings of scheduling policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ridgeline.core.errors import InvalidConfig

MOST_WEIGHTS = 1024  # tenants whose weights may be given
RANGE = 1e-3, 1e3  # of a weight
MOST_SECONDS = 3600.0  # of an objective
AGING = 60.0  # seconds of waiting that are worth one level of priority


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The settings of all policies; each reads its own.

    tenant_weights: tenant → its share of service, where another tenant has 1.
    priority_aging: seconds of waiting after which a request rises by one level of priority; 0: never.
    slo_ttft: seconds from arrival to the first token, for requests that name none. slo_itl: seconds between tokens,
        likewise; 0: there is no such objective.
    """

    tenant_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    priority_aging: float = AGING
    slo_ttft: float = 2.0
    slo_itl: float = 0.0


def weights_of(text: str) -> dict[str, float]:
    """Return the weights in "a=2,b=1". Raise InvalidConfig for anything else."""
    if not isinstance(text, str):
        raise InvalidConfig(f"tenant_weights is text, as a=2,b=1, got {text!r}.")
    weights: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = float("nan")
        if not name or not RANGE[0] <= weight <= RANGE[1]:
            raise InvalidConfig(
                f"tenant_weights has {entry!r}; write tenant=weight,…, with weights from {RANGE[0]:g} to {RANGE[1]:g}."
            )
        if name in weights:
            raise InvalidConfig(f"tenant_weights names the tenant {name!r} twice; leave one out.")
        weights[name] = weight
    if len(weights) > MOST_WEIGHTS:
        raise InvalidConfig(f"tenant_weights names {len(weights)} tenants; at most {MOST_WEIGHTS} may have a weight.")
    return weights
