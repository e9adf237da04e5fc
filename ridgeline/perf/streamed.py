"""Layers that wait in the host's memory and are copied to the device in every step: which they are, and the rate that
is left."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from ridgeline.kernels.base.cost import CostModel, StepShape

BUFFERS = 2  # layers of them that the device holds at a time
GIB = 1 << 30


class LayersBelow(NamedTuple):
    """Layers that wait in the host's memory, spread evenly over all. num_bytes: of their matrices."""

    layers: tuple[int, ...]
    num_bytes: int

    def on_device(self, model: ModelSpec) -> ModelSpec:
        """Return a model with as many weights as the device holds: of these layers two at a time."""
        kept = [layer for n, layer in enumerate(model.layers) if n not in self.layers]
        return replace(model, layers=(*kept, *(model.layers[n] for n in self.layers[:BUFFERS])))


def layers_below(model: ModelSpec, gib: float, item: float) -> LayersBelow:
    """Return the layers whose matrices have so many GiB together, or a little more: an even number of them. item: bytes
    of a number. Raise InvalidConfig for a model whose layers cannot wait."""
    if any(not _is_plain(layer) for layer in model.layers) or len(model.layers) < BUFFERS:
        raise InvalidConfig(
            "cpu_offload_gb is for models of attention and dense feed-forwards; leave it out, or use "
            "moe_expert_cache_size for experts."
        )
    sizes = [int(item * _matrices(layer, model.hidden_size)) for layer in model.layers]
    each, most = max(sizes), len(sizes) - len(sizes) % BUFFERS
    count = min(most, BUFFERS * -(-int(gib * GIB) // (BUFFERS * each)))
    layers = tuple((2 * n + 1) * len(sizes) // (2 * count) for n in range(count))
    return LayersBelow(layers, sum(sizes[n] for n in layers))


def _is_plain(layer: LayerSpec) -> bool:
    plain = isinstance(layer.mixer, AttentionSpec) and isinstance(layer.feed_forward, MLPSpec)
    return plain and layer.same_as is None and layer.streams is None and layer.inputs is None


def _matrices(layer: LayerSpec, width: int) -> int:
    return sum(product.copies * product.inputs * product.outputs for product in layer.products(width).values())


class StreamedCost(NamedTuple):
    """The cost of a step whose layers come from the host's memory while others compute. copying: seconds in which all
    of them come."""

    computing: CostModel
    copying: float

    def step_limit(self, shape: StepShape) -> float:
        """Return the seconds of the slower of both."""
        return max(self.copying, self.computing.step_limit(shape))
