"""The mesh: which ranks there are, by axis, as one of them sees it. It is handed down; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.model_spec import ModelSpec
from ridgeline.core.sharding import part_of
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.ring import SOLO, Ring


@dataclass(frozen=True)
class Mesh:
    """The axes on which a rank has neighbours.

    tp: the ranks that divide every matrix (`core.sharding`).
    whole_experts: they divide the experts of a mixture between them, and no expert's matrices.
    cp: the ranks that divide the cached tokens, and those of long prompts (`core.stripes`). Each has all of the model,
        or the same part by tp.
    """

    tp: Axis = ALONE
    whole_experts: bool = False
    cp: Ring = SOLO

    def part_of(self, model: ModelSpec) -> ModelSpec:
        """Return what a rank computes of a model. Raise InvalidConfig if it cannot be divided so."""
        return part_of(model, self.tp.size, whole_experts=self.whole_experts)
