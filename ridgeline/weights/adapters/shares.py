"""A rank's share of adapters, where several ranks divide the matrices or the layers of a model.

A map whose outputs are divided has its share of the rows of `up`, and all of `down`. A map whose inputs are divided has
all of `up`, and its share of the columns of `down`: the sum over ranks that completes the map's products completes the
adapter's too. The loader's rules for the map's weight say which rows and columns these are (`weights.divided`). A stage
of a pipeline has what its own layers' maps need.

Of experts' matrices a rank has those of its own experts, or its share of the columns and rows of each.

Legend:
    E  experts
    I  inputs of a module
    O  outputs of a module
    R  the adapter's rank there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ridgeline.core.plan.sharding import cut
from ridgeline.core.plan.stages import weights_of_stage
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.weights.adapters.places import ENCODERS, HEAD, ModulePlace, expert_places, places_in, vocabulary_places
from ridgeline.weights.adapters.reader import Factors, ReadAdapter
from ridgeline.weights.adapters.stacks import ThinPair
from ridgeline.weights.divided import Place, divided, own_sources, whole_decoder
from ridgeline.weights.loader import stored_view
from ridgeline.weights.quantized.plan import fused_parts

Parts = Sequence[int] | None


class AdapterShares:
    """The shares of one rank. decoder: the rank's part of the model. places: the whole model's.

    own: the places in the rank's linear maps, by the names of the checkpoint's modules.
    sees: the rank has the tower or listener, which no others divide; later stages of a pipeline have none.
    """

    def __init__(self, decoder: Decoder, weights: WeightMap, places: Mapping[str, ModulePlace]) -> None:
        whole, kept = whole_decoder(decoder), weights_of_stage(weights, decoder.spec)
        linear = {
            name: sources
            for name, sources in kept.items()
            if all(_of(each) in places and not places[_of(each)].map.experts for each in sources)
        }
        divisions = own_sources(linear, decoder, whole)
        self.own = places_in(decoder, divisions) | vocabulary_places(decoder, divisions)
        own_experts = expert_places(decoder, kept)
        if experts := {name: place for name, place in own_experts.items() if name in places}:
            self.own |= experts
        self._experts = {places[name].map.name: place.map for name, place in experts.items()}
        self._numbers = {place.map.name: _numbers(decoder, place.map.name) for place in experts.values()}
        self._rank, self._size = decoder.tp.rank, decoder.tp.size
        self.sees = decoder.tower is not None or decoder.listener is not None
        self._undivided = (HEAD, *ENCODERS) if self.sees else (HEAD,)  # what every rank has whole
        self._parts: dict[str, tuple[Parts, Parts]] = {}  # of the rank, of the whole model
        for name, sources in linear.items():
            owner, all_of_it = (each.get_submodule(name.removesuffix(".weight")) for each in (decoder, whole))
            for own, source in zip(divisions[name], sources, strict=True):
                parts = fused_parts(owner, divisions[name], own), fused_parts(all_of_it, sources, source)
                self._parts[_of(source)] = parts

    def of(self, adapter: ReadAdapter) -> ReadAdapter:
        """Return the rank's share of an adapter of the whole model. Its key stays."""
        pairs = (
            ThinPair(
                self._own(place),
                self._columns(place, down_RI),
                self._rows(place, up_OR),
                None if magnitude_O is None else self._rows(place, magnitude_O[:, None])[:, 0],
            )
            for place, down_RI, up_OR, magnitude_O in adapter.pairs
            if _of(place.source) in self.own and not place.map.experts
        )
        experts = (self._of_experts(pair) for pair in adapter.pairs if pair.place.map.name in self._experts)
        heads = (pair for pair in adapter.pairs if pair.place.map.name.startswith(self._undivided))
        factors = (
            Factors(
                self._own(place),
                None if input_1I is None else self._columns(place, input_1I),
                None if output_O1 is None else self._rows(place, output_O1),
                self._addend(place, added_O),
            )
            for place, input_1I, output_O1, added_O in adapter.factors
            if _of(place.source) in self.own
        )
        also = (each for each in adapter.factors if each.place.map.name.startswith(self._undivided))
        return replace(adapter, pairs=(*pairs, *experts, *heads), factors=(*factors, *also))

    def _of_experts(self, pair: ThinPair) -> ThinPair:
        """Return the share of a part of all experts' matrices: what the rank's experts have of it."""
        whole = pair.place
        own = replace(whole, map=self._experts[whole.map.name])
        numbers = self._numbers[own.map.name]
        down_ERI, up_EOR = pair.down_RI[numbers], pair.up_OR[numbers]
        shape = len(numbers), pair.rank, own.map.inputs
        columns = cut(down_ERI.shape, shape, self._rank, self._size)
        rows = cut(up_EOR.shape, (len(numbers), own.outputs, pair.rank), self._rank, self._size)
        return ThinPair(own, down_ERI[columns].contiguous(), up_EOR[rows].contiguous())

    def _addend(self, place: ModulePlace, added_O: Tensor | None) -> Tensor | None:
        """Return a rank's rows of an addend; added up over ranks, it must count once."""
        if added_O is None or (self._rank > 0 and self._own(place).map.inputs < place.map.inputs):
            return None
        return self._rows(place, added_O[:, None])[:, 0]

    def _own(self, place: ModulePlace) -> ModulePlace:
        return self.own[_of(place.source)]

    def _columns(self, place: ModulePlace, down_RI: Tensor) -> Tensor:
        ours_RI = down_RI.new_empty(len(down_RI), self._own(place).map.inputs)
        self._cut(Place(ours_RI, lambda: ours_RI), Place(down_RI, lambda: down_RI))
        return ours_RI

    def _rows(self, place: ModulePlace, up_OR: Tensor) -> Tensor:
        own, (parts, whole_parts) = self._own(place), self._parts[_of(place.source)]
        ours_OR = up_OR.new_empty(own.outputs, up_OR.shape[1])
        self._cut(_rows(ours_OR, own.source, parts), _rows(up_OR, place.source, whole_parts))
        return ours_OR

    def _cut(self, own: Place, whole: Place) -> None:
        for tensor, read in divided([own], [whole], self._rank, self._size):
            tensor.copy_(read())


def _numbers(decoder: Decoder, name: str) -> list[int]:
    """Return the experts that a rank has of a mixture, of which this is a matrix."""
    mixture = decoder.get_submodule(name.rpartition(".")[0])
    assert isinstance(mixture, Experts)
    return (
        [*mixture.spec.experts_of(decoder.mesh.of_experts.rank)]
        if mixture.spec.held
        else [*range(mixture.spec.stacked)]
    )


def _of(source: Source) -> str:
    """Return the name of a source's module."""
    return source.name.removesuffix(".weight")


def _rows(up_OR: Tensor, source: Source, parts: Parts) -> Place:
    view = stored_view(up_OR, replace(source, transpose=False))
    return Place(view, lambda: view, parts=parts)
