"""The mesh: which ranks there are, by axis, as one of them sees it. It is handed down; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ridgeline.core.plan.sharding import Placement, part_of, with_experts_of_a_rank
from ridgeline.core.plan.stages import deal, stage_of
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.parallel.axis import ALONE, Axis, SwapsRows
from ridgeline.parallel.exchange import Exchange
from ridgeline.parallel.pipe import WHOLE, Pipe
from ridgeline.parallel.ring import SOLO, Ring
from ridgeline.parallel.stamps import Stamps, watched


@dataclass(frozen=True)
class Mesh:
    """The axes on which a rank has neighbours.

    tp: the ranks that divide every matrix (`core.plan.sharding`).
    whole_experts: they divide the experts of a mixture between them, and no expert's matrices.
    placement: the experts of each of them, where some have copies; None: equal parts.
    pp: the stages of a pipeline. layers: how many each has, as a user wants it (`core.plan.stages`).
    cp: the ranks that divide the cached tokens, and those of long prompts (`core.plan.stripes`). Each has all of the
        model, or the same part by tp.
    exchange: ranks that have tokens of their own, and all of the model but the experts, which they divide. There is no
        other axis then.
    shares_pictures: each rank of tp sees a share of a step's pictures, and tells the others its vectors.
    movers: the ranks between which experts can move while they run; None: experts stay where they are.
    stamps: where this rank notes when it comes to collectives; None: it takes no notes.
    """

    tp: Axis = ALONE
    whole_experts: bool = False
    placement: Placement | None = None
    pp: Pipe = WHOLE
    layers: str | None = None
    cp: Ring = SOLO
    exchange: Exchange | None = None
    shares_pictures: bool = False
    movers: SwapsRows | None = None
    stamps: Stamps | None = None

    def watched(self, stamps: Stamps | None) -> Mesh:
        """Return the mesh, whose ranks note from now on when they come to collectives, if there are stamps."""
        if stamps is None:
            return self
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        axes = {name: watched(axis, stamps) for name, axis in own.items() if getattr(axis, "size", 1) > 1}
        return replace(self, stamps=stamps, **axes)

    @property
    def of_experts(self) -> Axis | Exchange:
        """The ranks that have experts of their own."""
        return self.tp if self.exchange is None else self.exchange

    @property
    def size(self) -> int:
        """The number of ranks that divide the model."""
        return self.of_experts.size * self.pp.size * self.cp.size

    def smallest(self, value: int) -> int:
        """Return the smallest value that a rank has, of all that divide the model."""
        return self.cp.smallest(self.pp.smallest(self.of_experts.smallest(value)))

    def part_of(self, model: ModelSpec) -> ModelSpec:
        """Return a rank's part of a model. Raise InvalidConfig if it cannot be divided so."""
        part = part_of(
            model, self.tp.size, whole_experts=self.whole_experts, placement=self.placement, sources=self._sources
        )
        return part if self.pp.size == 1 else stage_of(part, self.pp.rank, deal(model, self.pp.size, self.layers))

    def stage_of(self, model: ModelSpec) -> ModelSpec:
        """Return the part of a model that the ranks of a rank's stage compute together. Raise InvalidConfig."""
        return model if self.pp.size == 1 else stage_of(model, self.pp.rank, deal(model, self.pp.size, self.layers))

    def with_own_experts(self, model: ModelSpec) -> ModelSpec:
        """Return the model, or a stage of it, with as many experts as a rank has, if ranks divide them. A stage may
        have none. Raise InvalidConfig."""
        if not self.whole_experts or self.of_experts.size == 1:
            return model
        if not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in model.layers):
            return model
        return with_experts_of_a_rank(model, self.of_experts.size, self.placement, sources=self._sources)

    @property
    def _sources(self) -> int:
        """The number of ranks that have tokens of their own."""
        return 1 if self.exchange is None else self.exchange.size
