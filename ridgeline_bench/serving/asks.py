"""The work of `bench serve` as requests of a simulation: the same arrivals, lengths and groups, without tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.traffic import MOST_CONTENT, Ask, Piece
from ridgeline_bench.serving.work import Work

MOST_GROUPS = 1 << 20


@dataclass(frozen=True)
class Tenant:
    """A tenant with its share of the requests, and the priority of these."""

    name: str
    share: float
    priority: int = 0


def tenants(text: str) -> tuple[Tenant, ...]:
    """Return the tenants of NAME:SHARE[:PRIORITY],… Raise InvalidConfig."""
    found = []
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition(":")
        share, _, priority = rest.partition(":")
        try:
            found.append(Tenant(name, float(share), int(priority or 0)))
        except ValueError:
            raise InvalidConfig(f"--tenants needs NAME:SHARE[:PRIORITY],…, got {part!r}.") from None
        if not 0 < found[-1].share <= 1e9:
            raise InvalidConfig(f"the share of a tenant must be above 0 and at most 1e9, got {part!r}.")
    return tuple(found)


def asks(work: Work, rate: float, several: tuple[Tenant, ...] = ()) -> Iterator[Ask]:
    """Yield the requests of one rate. Each begins with its group's tokens, if groups share any."""
    groups: set[int] = set()
    draw = random.Random(f"{work.seed}/tenants")
    for index, at in enumerate(work.arrivals(rate)):
        own, answer, group = work.sizes(index)
        shared = (Piece(group % MOST_GROUPS, work.prefix_tokens),) if work.prefix_tokens else ()
        seen = work.prefix_tokens if group in groups else 0
        if shared:
            groups.add(group)
        content = MOST_GROUPS + 2 * index % (MOST_CONTENT - 2 * MOST_GROUPS)
        tenant = draw.choices(several, [each.share for each in several])[0] if several else Tenant("", 1.0)
        yield Ask(
            number=index,
            at=at,
            prompt=(*shared, Piece(content, own)),
            answer=Piece(content + 1, answer),
            seen=seen,
            tenant=tenant.name,
            priority=tenant.priority,
        )
