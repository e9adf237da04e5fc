"""Weights that wait in the host's memory and are copied to the device in every step: which they are, and the rate that
is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import floor
from typing import NamedTuple, TypeVar

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import with_cached_experts
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec
from ridgeline.core.specs.shared import SharedBlockSpec
from ridgeline.kernels.base.cost import CostModel, StepShape
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.perf.footprint import product_name
from ridgeline.perf.precision import Precision

T = TypeVar("T")

BUFFERS = 2  # layers of them that the device holds at a time
GIB = 1 << 30
# Products that stay on the device: those of routers, and that of latents whose two sides attention multiplies by
STAYS = ("router", "expand")
LOOK = 0.5e-3  # seconds for which the host waits for a layer's routes (an H100, docs/parallel.md)


class LayersBelow(NamedTuple):
    """Layers that wait in the host's memory, spread evenly over all. num_bytes: of their matrices. kept: as many of
    them as the device has buffers for, the largest ones. hides: copies and computing run side by side."""

    layers: tuple[int, ...]
    num_bytes: int
    kept: tuple[int, ...]
    hides: bool = True

    @property
    def what(self) -> str:
        return "layers"

    def on_device(self, model: ModelSpec) -> ModelSpec:
        """Return a model with as many weights as the device holds."""
        away = set(self.layers) - set(self.kept)
        return replace(model, layers=tuple(layer for n, layer in enumerate(model.layers) if n not in away))

    def of_device(self, named: Mapping[str, T]) -> dict[str, T]:
        """Return the entries whose modules the device holds. named: by the decoder's modules."""
        away = tuple(f"layers.{n}." for n in self.layers if n not in self.kept)
        return {name: value for name, value in named.items() if not name.startswith(away or ("?",))}

    def seconds(self, computing: float, tokens: int, rate: float, reach: float = 1.0) -> float:
        """Return the seconds of a step of so many tokens: of the slower of copies and computing, or of both."""
        copying = self.num_bytes / rate
        return max(copying, computing) if self.hides else copying + computing


class ExpertsBelow(NamedTuple):
    """Experts that wait in the host's memory, where the device has slots for some of each layer. Those come that a
    step's tokens choose and that have no slot.

    mixtures: of each layer the experts, those of a token, and the bytes of one. num_bytes: of all experts, but as many
    as there are slots.
    """

    slots: int
    num_bytes: int
    mixtures: tuple[tuple[int, int, float], ...]

    @property
    def what(self) -> str:
        return "experts"

    def on_device(self, model: ModelSpec) -> ModelSpec:
        """Return a model with as many weights as the device holds."""
        return with_cached_experts(model, self.slots)

    def of_device(self, named: Mapping[str, T]) -> dict[str, T]:
        """Return the entries whose modules the device holds."""
        return dict(named)

    def seconds(self, computing: float, tokens: int, rate: float, reach: float = 1.0) -> float:
        """Return the seconds of a step of so many tokens, whose experts are known only once the layer has begun. Which
        of them are there is taken to be chance."""
        missing = sum(
            touched(tokens, experts, used, reach) * (1 - self.slots / experts) * each
            for experts, used, each in self.mixtures
        )
        return computing + missing / rate + LOOK * len(self.mixtures)


WeightsBelow = LayersBelow | ExpertsBelow


def layers_below(model: ModelSpec, gib: float, precision: Precision) -> LayersBelow:
    """Return the layers whose matrices have so many GiB together, or a little more. Raise InvalidConfig for a model
    whose layers cannot wait."""
    able = [n for n in range(len(model.layers)) if can_wait(model, n)]
    if not able:
        raise InvalidConfig("cpu_offload_gb is for layers with weights of their own, and this model has none.")
    sizes = {n: layer_bytes(model.layers[n], model.hidden_size, precision) for n in able}
    for count in range(1, len(able) + 1):
        layers = tuple(able[(2 * n + 1) * len(able) // (2 * count)] for n in range(count))
        if sum(sizes[n] for n in layers) >= gib * GIB:
            break
    kept = sorted(layers, key=lambda n: (-sizes[n], n))[:BUFFERS]
    return LayersBelow(layers, int(sum(sizes[n] for n in layers)), tuple(kept))


def can_wait(model: ModelSpec, number: int) -> bool:
    """Return True if a layer shares weights with no other one."""
    layer = model.layers[number]
    alone = layer.same_as is None and all(other.same_as != number for other in model.layers)
    return alone and not isinstance(layer.mixer, SharedBlockSpec)


def layer_bytes(layer: LayerSpec, width: int, precision: Precision) -> float:
    """Return the bytes of a layer's matrices that can wait."""
    return sum(
        product.copies * product.inputs * product.outputs * precision.weight_of(product_name(name, product))
        for name, product in layer.products(width).items()
        if name not in STAYS
    )


def experts_below(model: ModelSpec, gib: float, precision: Precision) -> ExpertsBelow | None:
    """Return the experts that wait if so many GiB of them do, or None if the model has fewer."""
    mixtures = list(_mixtures(model, precision))
    per_slot = sum(each for _, _, each in mixtures)
    fewest = min((experts for experts, _, _ in mixtures), default=0)
    slots = floor(fewest - gib * GIB / per_slot) if mixtures else 0
    if slots < max((used for _, used, _ in mixtures), default=1):
        return None
    waiting = sum((experts - slots) * each for experts, _, each in mixtures)
    return ExpertsBelow(slots, int(waiting), tuple(mixtures))


def _mixtures(model: ModelSpec, precision: Precision) -> Iterable[tuple[int, int, float]]:
    for layer in model.layers:
        if isinstance(spec := layer.feed_forward, ExpertsSpec):
            products = {name: each for name, each in layer.products(model.hidden_size).items() if each.copies > 1}
            size = sum(
                each.inputs * each.outputs * precision.weight_of(product_name(name, each))
                for name, each in products.items()
            )
            yield spec.stacked, spec.routing.top_k, size


def cheaper(
    layers: LayersBelow, experts: ExpertsBelow | None, tokens: int, rate: float, computing: float
) -> WeightsBelow:
    """Return the weights with which a step of so many tokens takes less time. rate: bytes a second from the host's
    memory. computing: seconds of the step with all weights on the device."""
    if experts is None or experts.seconds(computing, tokens, rate) >= layers.seconds(computing, tokens, rate):
        return layers
    return experts


class StreamedCost(NamedTuple):
    """The cost of a step some of whose weights come from the host's memory, at so many bytes a second."""

    computing: CostModel
    below: WeightsBelow
    rate: float

    def step_limit(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        limit, tokens = self.computing.step_limit(shape), int(sum(shape.num_tokens_R))
        return self.below.seconds(limit, tokens, self.rate, shape.reach)
