"""The mesh: which ranks there are, by axis, as one of them sees it. It is handed down; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.model_spec import ModelSpec
from ridgeline.core.sharding import Placement, part_of, with_experts_of_a_rank
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.exchange import Exchange


@dataclass(frozen=True)
class Mesh:
    """The axes on which a rank has neighbours.

    tp: the ranks that divide every matrix (`core.sharding`).
    whole_experts: they divide the experts of a mixture between them, and no expert's matrices.
    exchange: ranks that have tokens of their own, and all of the model but the experts, which they divide. There is no
        `tp` then.
    placement: the experts of each rank, where some have copies; None: equal parts.
    """

    tp: Axis = ALONE
    whole_experts: bool = False
    exchange: Exchange | None = None
    placement: Placement | None = None

    @property
    def of_experts(self) -> Axis | Exchange:
        """The ranks that have experts of their own."""
        return self.tp if self.exchange is None else self.exchange

    def part_of(self, model: ModelSpec) -> ModelSpec:
        """Return what a rank computes of a model. Raise InvalidConfig if it cannot be divided so."""
        if self.exchange is not None:
            return self.with_own_experts(model)
        return part_of(model, self.tp.size, whole_experts=self.whole_experts, placement=self.placement)

    def with_own_experts(self, model: ModelSpec) -> ModelSpec:
        """Return the model with as many experts as a rank has, if ranks divide them. Raise InvalidConfig."""
        if not self.whole_experts or self.of_experts.size == 1:
            return model
        sources = 1 if self.exchange is None else self.exchange.size
        return with_experts_of_a_rank(model, self.of_experts.size, self.placement, sources=sources)
