"""The mesh: which ranks there are, by axis, as one of them sees it. It is handed down; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.model_spec import ModelSpec
from ridgeline.core.sharding import part_of
from ridgeline.core.stages import deal, stage_of
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.pipe import WHOLE, Pipe


@dataclass(frozen=True)
class Mesh:
    """The axes on which a rank has neighbours.

    tp: the ranks that divide every matrix (`core.sharding`).
    whole_experts: they divide the experts of a mixture between them, and no expert's matrices.
    pp: the stages of a pipeline. layers: how many each has, as a user wants it (`core.stages`).
    """

    tp: Axis = ALONE
    whole_experts: bool = False
    pp: Pipe = WHOLE
    layers: str | None = None

    def part_of(self, model: ModelSpec) -> ModelSpec:
        """Return what a rank computes of a model. Raise InvalidConfig if it cannot be divided so."""
        part = part_of(model, self.tp.size, whole_experts=self.whole_experts)
        return part if self.pp.size == 1 else stage_of(part, self.pp.rank, deal(model, self.pp.size, self.layers))

    def stage_of(self, model: ModelSpec) -> ModelSpec:
        """Return what the ranks of a rank's stage compute together. Raise InvalidConfig."""
        return model if self.pp.size == 1 else stage_of(model, self.pp.rank, deal(model, self.pp.size, self.layers))

    @property
    def size(self) -> int:
        """The number of ranks that divide the model."""
        return self.tp.size * self.pp.size

    def smallest(self, value: int) -> int:
        """Return the smallest value that a rank has, of all that compute a plan together."""
        return self.pp.smallest(self.tp.smallest(value))
