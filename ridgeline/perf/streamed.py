"""Weights that wait in the host's memory and are copied to the device in every step: which they are, and the rate that
is left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import floor
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.cache import WeightsWanted
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.core.specs.shared import SharedBlockSpec
from ridgeline.kernels.base.cost import CostModel, StepShape
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.perf.footprint import product_name
from ridgeline.perf.precision import Precision

GIB = 1 << 30
# Products that stay on the device: those of routers, and that of latents whose two sides attention multiplies by
STAYS = ("router", "expand")
LOOK = 0.5e-3  # seconds for which the host waits for a layer's routes (an H100, docs/parallel.md)


class LayersBelow(NamedTuple):
    """Layers that wait in the host's memory. num_bytes: of their matrices. buffers: layers that the device holds at a
    time, and their bytes. modules: those whose matrices wait, by the decoder's names; None: all of the layers.
    hides: copies and computing run side by side."""

    layers: tuple[int, ...]
    num_bytes: int
    buffers: tuple[int, int]
    modules: frozenset[str] | None = None
    hides: bool = True

    @property
    def what(self) -> str:
        return "layers"

    @property
    def saved(self) -> int:
        """Bytes of weights that the device has no room for."""
        return self.num_bytes - self.buffers[1]

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

    @property
    def saved(self) -> int:
        """Bytes of weights that the device has no room for."""
        return self.num_bytes

    def seconds(self, computing: float, tokens: int, rate: float, reach: float = 1.0) -> float:
        """Return the seconds of a step of so many tokens, whose experts are known only once the layer has begun. Which
        of them are there is taken to be chance."""
        missing = sum(
            touched(tokens, experts, used, reach) * (1 - self.slots / experts) * each
            for experts, used, each in self.mixtures
        )
        return computing + missing / rate + LOOK * len(self.mixtures)


WeightsBelow = LayersBelow | ExpertsBelow


def layers_below(
    model: ModelSpec, wanted: WeightsWanted, precision: Precision, modules: Collection[str] | None = None
) -> LayersBelow:
    """Return the layers that wait: the last ones of each group, or as many as have so many GiB together, or a little
    more, spread evenly. modules: those whose matrices wait, by the decoder's names; None: all. Raise InvalidConfig if
    no layer can."""
    every = {n: layer_bytes(model, n, precision, modules) for n in range(len(model.layers)) if can_wait(model, n)}
    sizes = {n: size for n, size in every.items() if size}
    size, last = wanted.group
    layers: tuple[int, ...] = tuple(n for n in sizes if n % size >= size - last) if size else _spread(sizes, wanted.gib)
    if not layers:
        raise InvalidConfig(
            "no layer of this model has weights of its own that could wait in the host's memory as cpu_offload_gb, "
            "offload_group_size and offload_params say; leave them out."
        )
    buffers = sorted((sizes[n] for n in layers), reverse=True)[: 1 + wanted.ahead]
    names = None if modules is None else frozenset(modules)
    return LayersBelow(layers, int(sum(sizes[n] for n in layers)), (len(buffers), int(sum(buffers))), names)


def _spread(sizes: Mapping[int, float], gib: float) -> tuple[int, ...]:
    """Return layers that have so many GiB together, evenly spread over those that there are."""
    able, layers = list(sizes), tuple[int, ...]()
    for count in range(1, len(able) + 1):
        layers = tuple(able[(2 * n + 1) * len(able) // (2 * count)] for n in range(count))
        if sum(sizes[n] for n in layers) >= gib * GIB:
            break
    return layers


def can_wait(model: ModelSpec, number: int) -> bool:
    """Return True if a layer shares weights with no other one."""
    layer = model.layers[number]
    alone = layer.same_as is None and all(other.same_as != number for other in model.layers)
    return alone and not isinstance(layer.mixer, SharedBlockSpec)


def layer_bytes(model: ModelSpec, number: int, precision: Precision, modules: Collection[str] | None = None) -> float:
    """Return the bytes of a layer's matrices that can wait. modules: those that may, by the decoder's names."""
    return sum(
        product.copies * product.inputs * product.outputs * precision.weight_of(product_name(name, product))
        for name, product in model.layers[number].products(model.hidden_size).items()
        if name not in STAYS and (modules is None or _names(number, name) & set(modules))
    )


def _names(layer: int, product: str) -> set[str]:
    """Return the names that the module of a product may have in the decoder."""
    return {f"layers.{layer}.{part}.{product}" for part in ("mixer", "feed_forward")}


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
