"""A request whose first layers are computed by the host's CPU and the others by a device, as llama.cpp divides a model.

A token passes through both, one after the other. Each reads its part of the weights and of the cache at the rate of its
own memory. The hidden state goes over the bus and between two processes, and the token comes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.division import Stage, stage_weights, stages
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.links import Links
from ridgeline.perf.precision import Precision
from ridgeline.perf.roofline import Roofline

TOKEN_BYTES = 4


class HostLayers(NamedTuple):
    """A division, with the first `layers` on the host.

    host_bytes, device_bytes: of weights.
    host, device, handed: seconds of a decode step of one request: at either place, and on the way.
    fits: the device's part of the weights fits into its memory.
    """

    layers: int
    host_bytes: float
    device_bytes: float
    host: float
    device: float
    handed: float
    fits: bool

    @property
    def rate(self) -> float:
        """The tokens of the request per second."""
        return 1 / (self.host + self.device + self.handed)


class Place(NamedTuple):
    """A place that computes layers, and the form of the weights there."""

    hardware: Hardware
    precision: Precision


class Places(NamedTuple):
    """The two places, and the links between processes of this host."""

    host: Place
    device: Place
    links: Links


def host_layers(
    model: ModelSpec,
    counts: Sequence[int],
    places: Places,
    kv_dtype: str,
    context: int,
    utilization: float = 1.0,
) -> list[HostLayers]:
    """Return the figures of each number of first layers on the host, with so many tokens in the cache. Raise
    InvalidConfig for numbers that the model has not."""
    total = len(model.layers)
    if wrong := [count for count in counts if not 0 <= count <= total]:
        raise InvalidConfig(f"{wrong[0]} layers on the host: the model has {total}; give 0 to {total}.")
    shape, found = StepShape([1], [context], 1), list[HostLayers]()
    for count in counts:
        parts = _parts(model, count)
        size, time = [0.0, 0.0], [0.0, 0.0]
        for number, (where, stage) in enumerate(zip((places.host, places.device), parts, strict=True)):
            if stage is not None:
                size[number] = stage_weights(stage, where.precision)
                own = shape._replace(num_sampled=int(stage.last))
                time[number] = Roofline(stage.model, *where, kv_dtype).step_limit(own)
        handed = _handed(model, places) if all(parts) else 0.0
        fits = size[1] <= places.device.hardware.memory * utilization
        found.append(HostLayers(count, size[0], size[1], time[0], time[1], handed, fits))
    return found


def _parts(model: ModelSpec, count: int) -> list[Stage | None]:
    """Return the host's stage and the device's, if they have layers."""
    if count in (0, len(model.layers)):
        whole = Stage(model=model, first=True, last=True)
        return [whole, None] if count else [None, whole]
    return list(stages(model, model, 2, f"{count},{len(model.layers) - count}"))


def _handed(model: ModelSpec, places: Places) -> float:
    """Return the seconds in which a row goes to the device and its token comes back."""
    hardware, precision = places.device
    row = model.hidden_size * precision.item * (1 + any(layer.embedded for layer in model.layers))
    bus = 0.0 if hardware.pcie is None else (row + TOKEN_BYTES) / hardware.pcie
    return bus + sum(places.links.seconds("send", 2, size) for size in (row, TOKEN_BYTES))
