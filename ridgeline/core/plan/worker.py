"""The abilities of a worker. Every worker runs plans; each further ability is a protocol of its own, which others look
for (`isinstance`) where they need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ridgeline.core.plan.expert_cache import ExpertCacheFigures
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.pictures import EncoderFigures
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.core.plan.sleep import Kind
from ridgeline.core.plan.step import MaskedDrafts, Moves, StepPlan, StepResult
from ridgeline.core.settings.rebalancing import Rebalanced


class Worker(Protocol):
    """One device (or a group of devices that acts as one). Calls return at once; only `collect` waits."""

    def submit(self, plan: StepPlan) -> None:
        """Launch the plan's forward segment unless drafts come with its masks, and its sample segment unless a row
        waits for a mask."""

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        """Launch the sample segment of a plan that waits for masks, and its forward segment if that waits for drafts.

        masks: row → the tokens that may be drawn, as packed bits, uint32 [words] (`core.plan.token_bits`). A row
            without a mask may draw any token. The arrays must stay as they are until the plan is collected.
        drafts: of all rows with masks that verify drafts, however few there are; None unless a plan has such rows
            (`Feature.GIVEN`). The mask of such a row is that of its first token.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest plan that has not been collected, and return its result."""

    def shutdown(self) -> None: ...


@runtime_checkable
class Sleeps(Protocol):
    """A worker that gives its memory back for a while."""

    @property
    def wakeful(self) -> str | None:
        """The reason why it cannot, or None."""

    def sleep(self) -> None:
        """Give the device's memory back. No plan may be under way."""

    def wake(self, kinds: Sequence[Kind]) -> bool:
        """Bring memory of these kinds back. Return True if all is back then. Raise InvalidConfig if others have taken
        it."""


@runtime_checkable
class KeepsBelow(Protocol):
    """A worker whose blocks in the host's memory others may read and write. It is asked if there is a tier."""

    def octets(self, group: int, block: int) -> Sequence[memoryview]:
        """Return a block's bytes, which may be written to: each rank's part of it."""

    def settled(self) -> int:
        """Return the newest plan up to which all copies from and to the host's memory have ended: at least those of
        plans that were collected, or fewer where copies take longer than their plans."""

    def end_moves(self) -> None:
        """Wait until all copies have ended. No plan may be under way."""

    def move(self, plan: int, moves: Moves) -> None:
        """Move blocks behind plans up to this one, which have all been collected."""

    def move_seconds(self) -> tuple[float, float]:
        """Return the seconds that copies to the host's memory took, and those from it."""


@runtime_checkable
class Rests(Protocol):
    """A worker that prepares later steps while there is no request."""

    def rest(self) -> bool:
        """Do a piece of it, of some milliseconds. Return True if there is more to do. No plan may be under way."""


class Reports(Protocol):
    """A worker that tells of itself."""

    def figures(self) -> WorkerFigures:
        """Return its counts. While plans are under way the loads of experts are those of the newest look, so that
        no plan waits. Raise DeviceLost if the device is lost."""

    def forget_expert_load(self) -> None:
        """Count the loads of experts from here on. No plan may be under way."""


@dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """The counts of a worker since it was made.

    experts: the tokens that the experts got; None for a model without experts.
    kv_saturated: numbers beyond what a checkpoint's scales let the KV cache hold.
    saturated: activations that static scales have cut off.
    waits: which ranks waited, and for which others waited; none without `rank_trace_dir`.
    expert_cache: experts that were on the device and foreseen; None if all are always there.
    moved_bytes: of experts that changed places, as they came.
    rebalanced: the outcome of such moves; None if experts stay where they are.
    encoder: the work of the tower that sees pictures; None if there is none.
    """

    experts: ExpertLoad | None = None
    kv_saturated: int = 0
    saturated: int = 0
    waits: Sequence[RankWaits] = ()
    expert_cache: ExpertCacheFigures | None = None
    moved_bytes: int = 0
    rebalanced: Rebalanced | None = None
    encoder: EncoderFigures | None = None

    def after(self, before: WorkerFigures) -> WorkerFigures:
        """Return the counts of this worker and of one before it. What is no count is as it is now."""
        cache, moved, encoder = self.expert_cache, self.rebalanced, self.encoder
        return WorkerFigures(
            experts=_experts(self.experts, before.experts),
            kv_saturated=self.kv_saturated + before.kv_saturated,
            saturated=self.saturated + before.saturated,
            waits=_waits(self.waits, before.waits),
            expert_cache=cache if cache is None or before.expert_cache is None else cache.plus(before.expert_cache),
            moved_bytes=self.moved_bytes + before.moved_bytes,
            rebalanced=moved if moved is None or before.rebalanced is None else moved.plus(before.rebalanced),
            encoder=encoder if encoder is None or before.encoder is None else encoder.plus(before.encoder),
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
