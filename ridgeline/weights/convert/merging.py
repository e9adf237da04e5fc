"""An adapter added to the weights that `ridgeline convert` writes.

Legend:
    I  inputs of a module
    O  outputs of a module
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.adapters import MOST_RANK, gguf_adapter
from ridgeline.models.config import ModelConfig
from ridgeline.perf.footprint import parameters
from ridgeline.weights.adapters.gguf import read_gguf_adapter
from ridgeline.weights.adapters.places import EMBED, ModulePlace, placed, places_in, vocabulary_places, with_head
from ridgeline.weights.adapters.reader import Factors, ReadAdapter, read_adapter
from ridgeline.weights.adapters.stacks import ThinPair
from ridgeline.weights.loader import empty_decoder, shortened

Make = Callable[[], Tensor]


class MergedAdapter:
    """The changes that an adapter makes to weights, by the names of a checkpoint's tensors: products (LoRA), magnitudes
    (DoRA), factors (IA3), and whole tensors in place of the model's. Raise ModelLoadError as `read_adapter`."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        found = _read(folder, model)
        self._changes: dict[str, Callable[[Make], Tensor]] = {
            pair.place.source.name: partial(_with_product, pair) for pair in found.pairs
        }
        scaled = [each for each in found.factors if each.input_1I is not None or each.output_O1 is not None]
        self._changes |= {each.place.source.name: partial(_scaled, each) for each in scaled}
        self._changes |= {
            _bias_of(each.place): partial(_with_addend, each) for each in found.factors if each.added_O is not None
        }
        tables = {name: partial(_instead, name, each) for name, each in found.replaced.items()}
        for name, instead in tables.items():  # PEFT saves a table beside the products that change it
            self._changes[name] = _after(instead, self._changes[name]) if name in self._changes else instead
        of_tables = vocabulary_places(empty_decoder(model.spec), with_head(model.weights))
        for module, rows in found.own_rows(tied=model.spec.tie_word_embeddings).items():
            place = placed(module, of_tables)
            assert place is not None  # the reader has found it
            if place.source.name in self._changes:
                raise ModelLoadError(
                    f"the adapter changes {place.source.name} by trainable_token_indices and otherwise too, which "
                    "cannot be merged here; merge it by PEFT."
                )
            self._changes[place.source.name] = partial(_with_rows, *rows)
        own = next((place for place in of_tables.values() if place.map.name == EMBED), None)
        alone = own is not None and own.source.name in self._changes and not found.rows
        if model.spec.tie_word_embeddings and alone:
            raise ModelLoadError(
                "the adapter changes the table of the tokens, which is this model's output layer too, and not that; "
                "serve it with enable_lora_vocabulary instead."
            )
        self._missing = set(self._changes)
        for each in scaled:
            if each.output_O1 is not None:  # what a module adds is multiplied too
                self._changes[_bias_of(each.place)] = partial(_scaled_bias, each)

    def added(self, name: str, make: Make) -> Make | None:
        """Return a function that makes a tensor as the adapter changes it, float32, or None for a tensor that the
        adapter does not change."""
        change = self._changes.get(name)
        self._missing.discard(name)
        return None if change is None else lambda: change(make)

    def check(self) -> None:
        """Raise ModelLoadError unless all of the adapter's tensors were asked for."""
        if self._missing:
            raise ModelLoadError(
                f"the model's files lack weights that the adapter changes: {shortened(sorted(self._missing))}."
            )


def _read(folder: Path, model: ModelConfig) -> ReadAdapter:
    whole, count = empty_decoder(model.spec), parameters(model.spec)
    places = places_in(whole, model.weights) | vocabulary_places(whole, with_head(model.weights))
    if (file := gguf_adapter(folder)) is not None:
        return read_gguf_adapter(file, whole, model.weights, places, most_rank=MOST_RANK, dtype=torch.float32)
    most = 4 * (count.embed + count.unembed + count.vectors) + 1
    return read_adapter(folder, places, most_rank=MOST_RANK, dtype=torch.float32, factors=True, most_replaced=most)


def _with_product(pair: ThinPair, make: Make) -> Tensor:
    """Return the weight with up · down, as the checkpoint has it: [O, I], or [I, O] where it is stored so. With
    magnitudes its rows get these as their norms."""
    place = pair.place
    flip = place.source.transpose or place.map.name == EMBED  # whose rows are inputs
    delta_OI = place.in_their_order(pair.up_OR) @ pair.down_RI
    weight = make().float() + (delta_OI.T if flip else delta_OI)
    if pair.magnitude_O is None:
        return weight
    own_O = pair.magnitude_O if place.factor_O is None else pair.magnitude_O / place.factor_O.abs()
    norm_O1 = _theirs(place, own_O[:, None])
    along = 0 if flip else 1
    return weight * (norm_O1.T if flip else norm_O1) / weight.norm(dim=along, keepdim=True)


def _scaled(factors: Factors, make: Make) -> Tensor:
    place, flip = factors.place, factors.place.source.transpose
    if factors.input_1I is not None:
        return make().float() * (factors.input_1I.T if flip else factors.input_1I)
    assert factors.output_O1 is not None
    factor_O1 = _theirs(place, factors.output_O1)
    return make().float() * (factor_O1.T if flip else factor_O1)


def _scaled_bias(factors: Factors, make: Make) -> Tensor:
    assert factors.output_O1 is not None
    return make().float() * _theirs(factors.place, factors.output_O1)[:, 0]


def _with_addend(factors: Factors, make: Make) -> Tensor:
    assert factors.added_O is not None
    return make().float() + factors.place.in_their_order(factors.added_O[:, None])[:, 0]


def _bias_of(place: ModulePlace) -> str:
    return place.source.name.removesuffix("weight") + "bias"


def _theirs(place: ModulePlace, ours_O1: Tensor) -> Tensor:
    """Return one number for each output in the checkpoint's order."""
    return replace(place, factor_O=None).in_their_order(ours_O1)


def _with_rows(tokens: Sequence[int], rows_NI: Tensor, make: Make) -> Tensor:
    """Return a table with these rows in place of its own."""
    found_OI = make().float().clone()
    found_OI[list(tokens)] = rows_NI
    return found_OI


def _after(first: Callable[[Make], Tensor], then: Callable[[Make], Tensor]) -> Callable[[Make], Tensor]:
    return lambda make: then(lambda: first(make))


def _instead(name: str, tensor: Tensor, make: Make) -> Tensor:
    before = tuple(make().shape)
    if before != tuple(tensor.shape):
        raise ModelLoadError(
            f"the adapter holds {name} of shape {tuple(tensor.shape)}, and the model has {before}: it was trained with "
            "another vocabulary; merge it by PEFT."
        )
    return tensor
