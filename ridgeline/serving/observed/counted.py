"""The counts of an engine and its worker. They begin at 0 with every engine, and another one may take its place while
the process stays. What is shown must never go down, so the counts of both are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.cost import Headroom
from ridgeline.core.expert_cache import ExpertCacheFigures
from ridgeline.core.expert_load import ExpertLoad
from ridgeline.core.rank_waits import RankWaits
from ridgeline.core.rebalancing import Rebalanced
from ridgeline.engine.figures import Figures


@dataclass(frozen=True)
class Counted:
    """An engine's figures and headroom, and what its worker tells: experts, saturations of cache and activations,
    waits, experts' cache, experts that moved."""

    figures: Figures
    headroom: Headroom
    experts: ExpertLoad | None = None
    kv_saturated: int = 0
    saturations: int = 0
    waits: Sequence[RankWaits] = ()
    expert_cache: ExpertCacheFigures | None = None
    rebalanced: Rebalanced | None = None

    def after(self, before: Counted) -> Counted:
        """Return the counts of this engine and of those before it. What is no count is as it is now."""
        cache, moved = self.expert_cache, self.rebalanced
        return Counted(
            figures=self.figures.after(before.figures),
            headroom=self.headroom.plus(*before.headroom),
            experts=_experts(self.experts, before.experts),
            kv_saturated=self.kv_saturated + before.kv_saturated,
            saturations=self.saturations + before.saturations,
            waits=_waits(self.waits, before.waits),
            expert_cache=cache if cache is None or before.expert_cache is None else cache.plus(before.expert_cache),
            rebalanced=moved if moved is None or before.rebalanced is None else moved.plus(before.rebalanced),
        )


def _experts(now: ExpertLoad | None, before: ExpertLoad | None) -> ExpertLoad | None:
    if now is None or before is None:
        return before if now is None else now
    return now._replace(total_LE=now.total_LE + before.total_LE)


def _waits(now: Sequence[RankWaits], before: Sequence[RankWaits]) -> list[RankWaits]:
    earlier = {each.rank: each for each in before}
    return [_longer(each, earlier[each.rank]) if each.rank in earlier else each for each in now]


def _longer(now: RankWaits, before: RankWaits) -> RankWaits:
    return now._replace(
        steps=now.steps + before.steps, waited=now.waited + before.waited, caused=now.caused + before.caused
    )
