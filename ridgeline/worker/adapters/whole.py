"""Whole tensors that an adapter has in place of the model's own: the maps behind pooling, and biases of layers.

Legend:
    O  outputs of a linear map
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.stages import weights_of_stage
from ridgeline.core.specs.model import WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.weights.adapters.places import HEAD, ModulePlace, placed, places_in
from ridgeline.weights.adapters.reader import Factors, ReadAdapter
from ridgeline.worker.adapters.magnitudes import numbers_of


class WholeTensors:
    """The tensors of a rank's part of a model that an adapter can have whole. factors: biases are among them."""

    def __init__(self, decoder: Decoder, weights: WeightMap, *, factors: bool) -> None:
        self._decoder, self._factors = decoder, factors
        own = weights_of_stage(weights, decoder.spec)
        self._maps = places_in(decoder, own)
        self._heads = {
            sources[0].name: name for name, sources in own.items() if name.startswith(HEAD) and len(sources) == 1
        }
        self._others = {source.name: source.name for sources in weights.values() for source in sources}

    def settled(self, adapter: ReadAdapter) -> ReadAdapter:
        """Return an adapter whose whole tensors have become heads and addends of outputs. Raise ModelLoadError for one
        that has others."""
        heads, factors = dict[str, Tensor](), list(adapter.factors)
        for name, tensor in adapter.replaced.items():
            if (parameter := placed(name, self._heads)) is not None:
                heads[parameter] = self._checked(name, tensor, parameter)
            elif self._is_bias_of_another(name):
                continue
            else:
                factors.append(self._addend(name, tensor))
        pairs = []
        for pair in adapter.pairs:
            if not pair.place.map.name.startswith(HEAD):
                pairs.append(pair)
                continue
            linear, parameter = _linear(self._decoder, pair.place), f"{pair.place.map.name}.weight"
            if parameter not in heads:
                heads[parameter] = numbers_of(linear, next(self._decoder.parameters()).device).float().cpu()
            heads[parameter] = heads[parameter] + pair.up_OR.float() @ pair.down_RI.float()
        return replace(adapter, pairs=tuple(pairs), factors=tuple(factors), heads=heads, replaced={})

    def _is_bias_of_another(self, name: str) -> bool:
        """Return True for a tensor of a stage that this one is not."""
        return (
            self._decoder.mesh.pp.size > 1
            and placed(name, self._others) is not None
            and placed(name.removesuffix(".bias"), self._maps) is None
        )

    def _addend(self, name: str, tensor: Tensor) -> Factors:
        """Return a bias as what is added to a map's outputs in its place."""
        place = placed(name.removesuffix(".bias"), self._maps) if name.endswith(".bias") else None
        if place is None or not self._factors or self._decoder.tp.size > 1:
            raise ModelLoadError(
                f"the adapter holds all of {name[:200]} (bias, or modules_to_save), and whole tensors are served of "
                "maps behind pooling, with enable_lora_factors of linear layers' biases on one device, and with "
                "enable_lora_tables of embeddings and output layers; merge it by `ridgeline convert --merge`."
            )
        bias = _linear(self._decoder, place).bias
        if bias is None or list(tensor.shape) != [place.outputs]:
            raise ModelLoadError(f"the adapter holds {name[:200]}, which this model has in another form; merge it.")
        old_O = bias.detach()[place.first : place.first + place.outputs].float().cpu()
        return Factors(place, None, None, place.in_our_order(tensor[:, None])[:, 0] - old_O)

    def _checked(self, name: str, tensor: Tensor, parameter: str) -> Tensor:
        module, _, kind = parameter.rpartition(".")
        linear = self._decoder.get_submodule(module)
        wanted = list(tensor.shape)
        if isinstance(linear, Linear):
            wanted = [sum(linear.parts), linear.inputs] if kind == "weight" else [sum(linear.parts)]
        if list(tensor.shape) != wanted or not parameter.removesuffix(f".{kind}").endswith(".dense"):
            raise ModelLoadError(
                f"the adapter holds {name[:200]} of shape {list(tensor.shape)}, and this model's is {wanted}; it is an "
                "adapter of another model, or of one with other labels."
            )
        return tensor


def _linear(decoder: Decoder, place: ModulePlace) -> Linear:
    linear = decoder.get_submodule(place.map.name)
    assert isinstance(linear, Linear)
    return linear


class PlacedHeads:
    """The maps behind pooling of the adapters that the device holds, by place: parameters by name."""

    def __init__(self, decoder: Decoder) -> None:
        self._device, self._dtype = next(decoder.parameters()).device, decoder.dtype
        self._at: dict[int, Mapping[str, Tensor]] = {}

    def fill(self, place: int, heads: Mapping[str, Tensor]) -> None:
        """Keep those of an adapter at a place, from 1."""
        self._at[place] = {
            name.removeprefix(HEAD): tensor.to(self._device, self._dtype) for name, tensor in heads.items()
        }

    def __call__(self, decoder: Decoder, x_RM: Tensor, places: list[int]) -> Tensor:
        """Return pooled vectors behind the head of each row's adapter."""
        own = [place if self._at.get(place) else 0 for place in places]
        if not any(own):
            return decoder.head(x_RM)
        found: Tensor | None = None
        for place in sorted(set(own)):
            rows = torch.tensor([row for row, each in enumerate(own) if each == place], device=x_RM.device)
            y_rM = decoder.head(x_RM[rows], self._at.get(place))
            found = y_rM.new_empty(len(x_RM), *y_rM.shape[1:]) if found is None else found
            found[rows] = y_rM
        assert found is not None
        return found
