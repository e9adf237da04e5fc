"""IA3 that is trained (Liu et al., arXiv 2205.05638): one vector for each module, which multiplies its inputs in
feed-forwards and its outputs elsewhere. It is written as PEFT writes it.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import MOST_RANK
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.quantization.weight import WrappedWeight
from ridgeline.training.lora import meant, write_adapter
from ridgeline.weights.adapters.config import ALL_LINEAR
from ridgeline.weights.adapters.places import ModulePlace, adaptable
from ridgeline.weights.adapters.reader import read_adapter

USUAL = ("k_proj", "v_proj", "down_proj")  # the paper's, by the names that most families have


class Vector(nn.Module):
    """The vector of one module, in the order of our map. It begins as ones. of_inputs: it multiplies these."""

    def __init__(self, place: ModulePlace, device: torch.device) -> None:
        super().__init__()
        self.place, self.of_inputs = place, place.map.name.endswith("feed_forward.down")
        self.factor = nn.Parameter(torch.ones(place.map.inputs if self.of_inputs else place.outputs, device=device))


@dataclass(frozen=True)
class ScaledWeight(WrappedWeight):
    """A frozen weight, whose inputs or outputs vectors multiply. vectors: by the first output that they change."""

    vectors: Mapping[int, Vector]

    @property
    def adapts(self) -> bool:
        return True

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # there is no buffer
        dtype = x_TI.dtype
        for each in self.vectors.values():
            x_TI = (x_TI * each.factor).to(dtype) if each.of_inputs else x_TI
        y_TO, parts, done = self.inner.linear(x_TI, bias_O), list[Tensor](), 0
        for first, each in sorted(self.vectors.items()):
            if not each.of_inputs:
                parts += [each.factor.new_ones(first - done), each.factor]
                done = first + each.place.outputs
        if not parts:
            return y_TO
        factor_O = torch.cat([*parts, parts[0].new_ones(y_TO.shape[1] - done)])
        return (y_TO * factor_O).to(y_TO.dtype)


class Ia3(nn.Module):
    """The vectors of an adapter, by the names of the checkpoint's modules with "/" for "."; they are in the decoder's
    linear maps from now on. All else of the decoder is frozen. Raise InvalidConfig for targets that no module has."""

    def __init__(self, decoder: Decoder, model: ModelConfig, targets: tuple[str, ...] | str) -> None:
        super().__init__()
        self.places = adaptable(model.spec, model.weights)
        self.targets = USUAL if targets == ALL_LINEAR else targets
        device = next(decoder.parameters()).device
        decoder.requires_grad_(False)
        self.maps = nn.ModuleDict()
        by_map: dict[str, dict[int, Vector]] = {}
        for module in meant(self.targets, self.places):
            place = self.places[module]
            vector = Vector(place, device)
            if vector.of_inputs and len(place.map.parts) > 1:
                raise InvalidConfig(f"{module} shares its inputs with others, so IA3 cannot scale them; leave it out.")
            self.maps[module.replace(".", "/")] = vector
            by_map.setdefault(place.map.name, {})[place.first] = vector
        for name, vectors in by_map.items():
            linear = decoder.get_submodule(name)
            assert isinstance(linear, Linear)
            inner = linear.matrix.inner if isinstance(linear.matrix, MultipliedWeight) else linear.matrix
            linear.multiply_with(ScaledWeight(linear.ops, inner, vectors))

    def export(self, folder: Path, base: str) -> None:
        """Write PEFT's two files, in float32, and read them as a server does. base: the model's name or folder."""
        tensors, fed = {}, set[str]()
        for name, each in self.maps.items():
            assert isinstance(each, Vector)
            module, factor = name.replace("/", "."), each.factor.detach().cpu()
            if each.of_inputs:
                fed |= {each for each in self.targets if f".{module}".endswith(f".{each}")}
                tensors[f"base_model.model.{module}.ia3_l"] = factor[None].contiguous()
            else:
                unscaled = replace(each.place, factor_O=None)
                tensors[f"base_model.model.{module}.ia3_l"] = unscaled.in_their_order(factor[:, None]).contiguous()
        entries = {"peft_type": "IA3", "target_modules": sorted(self.targets), "feedforward_modules": sorted(fed)}
        write_adapter(folder, tensors, entries, base, [self.places[name.replace("/", ".")] for name in self.maps])
        read_adapter(folder, self.places, most_rank=MOST_RANK, dtype=torch.float32, factors=True)
