"""The two matrices of a module, or of a layer's experts.

Legend:
    E  experts
    I  inputs of a module
    O  outputs of a module
    R  the adapter's rank there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.adapters.places import ModulePlace


class ThinPair(NamedTuple):
    """The two matrices of one module, with the module's place.

    down_RI, up_OR: of experts one for each, in a dimension in front. up_OR has the scale, and rows in our order.
    magnitude_O: the norms that the adapted weight's rows have (DoRA), float32, in our order; None: whatever they are.
    """

    place: ModulePlace
    down_RI: Tensor
    up_OR: Tensor
    magnitude_O: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down_RI.shape[-2]


def stacked_pairs(path: Path, place: ModulePlace, down_KI: Tensor, up_OK: Tensor) -> Iterator[ThinPair]:
    """Yield the pairs of all experts, one for each part, of PEFT's two tensors: A has the ranks of an expert below each
    other, and B's columns are all experts' of the first rank, then those of the second."""
    if not (down_KI.isfinite().all() and up_OK.isfinite().all()):
        raise ModelLoadError(f"{path} holds numbers of {place.map.name} that are not finite; train it again.")
    experts, parts = place.map.experts, place.map.parts
    down_ERI = down_KI.unflatten(0, (experts, -1)).contiguous()
    up_EOR = up_OK.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if place.source.alternating:
        by_part = [up_EOR[:, part :: len(parts)] for part in range(len(parts))]
    else:
        by_part = list(up_EOR.split(list(parts), dim=1))
    for part, own_EOR in enumerate(by_part):
        yield ThinPair(place.all_experts(part), down_ERI, own_EOR.contiguous())


def with_stacks(pairs: Iterable[ThinPair]) -> Iterator[ThinPair]:
    """Yield pairs, those of a layer's experts in one. Experts that have none get zeros."""
    of_experts = dict[tuple[str, int], list[ThinPair]]()
    for pair in pairs:
        if pair.place.expert is None:
            yield pair
        else:
            of_experts.setdefault((pair.place.map.name, pair.place.part), []).append(pair)
    for own in of_experts.values():
        place, rank = own[0].place, max(pair.rank for pair in own)
        down_ERI = own[0].down_RI.new_zeros(place.map.experts, rank, place.map.inputs)
        up_EOR = own[0].up_OR.new_zeros(place.map.experts, place.outputs, rank)
        for pair in own:
            assert pair.place.expert is not None
            down_ERI[pair.place.expert, : pair.rank] = pair.down_RI
            up_EOR[pair.place.expert, :, : pair.rank] = pair.up_OR
        yield ThinPair(place.all_experts(place.part), down_ERI, up_EOR)
