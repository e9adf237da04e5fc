"""Layers whose matrices wait in the host's memory, for a model that is larger than its device (Sheng et al., "FlexGen",
2023, from which the order of the copies is).

The device has two buffers or more, and a layer is copied into one of them while another is computed from another one. A
copy serves all rows of a step, however many they are. Behind the last of these layers the first ones are copied for the
next step. So the bus never rests, and a step takes as long as the slower of copies and computing.

    compute   | layer 0        | layer 2 waits for its copy | ...
    side      | layer 2 → B    | layer 4 → A, once layer 0 has been computed | ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.kernels.gemm.codes.panels import Panels
from ridgeline.kernels.gemm.experts.panels import ExpertPanels
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.experts import StackedWeights
from ridgeline.quantization.weight import tensors_in, weight_of

ALIGNMENT = 256  # bytes, of a piece of memory in a buffer

Prepare = Callable[[Iterable[nn.Module]], None]


class StreamedPiece(NamedTuple):
    """A piece of a layer's memory on the host, and its place in a buffer of the device."""

    host: Tensor
    here: Tensor


class WaitingTensor(NamedTuple):
    """A tensor that products read. like: one on no device with its shape, its strides and its dtype. piece: the number
    of the piece of memory in which it lies. start: the byte there at which it begins."""

    tensor: Tensor
    like: Tensor
    piece: int
    start: int


class WaitingLayer:
    """A layer with its matrices in the host's memory. They are prepared on the device, so that they have the forms that
    the device multiplies. hosts: the pieces of memory in which they lie."""

    def __init__(self, layer: nn.Module, device: torch.device, prepare: Prepare) -> None:
        modules = [each for each in layer.modules() if isinstance(each, (Linear, ExpertStack)) and each.below]
        if device.type != "cpu":
            for module in modules:
                _bring(module, device)
        prepare(layer.modules())
        self.hosts: list[Tensor] = []
        pairs = [pair for module in modules for pair in _pairs(module, device)]
        self._tensors = list(self._waiting(pairs))
        for tensor, _ in pairs if device.type != "cpu" else ():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)

    def _waiting(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[WaitingTensor]:
        """Copy the pieces of memory in which tensors lie to the host, each once."""
        numbers: dict[int, int] = {}
        for tensor, source in pairs:
            storage = source.untyped_storage()
            if (number := numbers.get(storage.data_ptr())) is None:
                number = numbers[storage.data_ptr()] = len(self.hosts)
                octets = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
                self.hosts.append(octets if source.device.type == "cpu" else _on_host(octets))
            like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
            yield WaitingTensor(tensor, like, number, int(source.storage_offset()) * source.element_size())

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def room(self) -> int:
        """Bytes of a buffer that the layer passes through."""
        return sum(map(_room, self.hosts))

    def place(self, buffer: Tensor) -> list[StreamedPiece]:
        """Let products read what is in a buffer."""
        starts = [0, *accumulate(map(_room, self.hosts))]
        for tensor, like, piece, first in self._tensors:
            start = starts[piece] + first
            whole = buffer[start : start + (len(buffer) - start) // like.element_size() * like.element_size()]
            numbers = whole.view(like.dtype)
            tensor.data = numbers.as_strided(like.shape, like.stride(), numbers.storage_offset())
        return [StreamedPiece(host, buffer[at : at + len(host)]) for host, at in zip(self.hosts, starts, strict=False)]


class StreamedLayers:
    """The copies of some layers of a decoder.

    layers: those that wait in the host's memory, by their numbers, in their order. They are loaded and not prepared.
    buffers: layers that the device holds at a time. Each layer always has the same buffer. prepare: gives the weights
        of modules their forms.
    """

    def __init__(self, layers: Mapping[int, nn.Module], buffers: int, device: torch.device, prepare: Prepare) -> None:
        waiting = [WaitingLayer(layer, device, prepare) for layer in layers.values()]
        self._at, self._device = {n: place for place, n in enumerate(layers)}, device
        size = max(layer.room for layer in waiting)
        self._first = range(min(buffers, len(waiting)))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in self._first]
        self._pieces = [layer.place(self._buffers[place % len(self._first)]) for place, layer in enumerate(waiting)]
        self.num_bytes = sum(layer.num_bytes for layer in waiting)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: list[torch.cuda.Event | None] = [None] * len(waiting)
        for place in self._first:
            self._copy(place)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device's memory that layers pass through."""
        return sum(map(len, self._buffers))

    def before(self, layer: int) -> None:
        """Let the compute stream wait for a layer's copy."""
        place = self._at.get(layer)
        if place is not None and (copied := self._copied[place]) is not None:
            copied.wait()

    def after(self, layer: int) -> None:
        """Copy another layer into the buffer of one that has been queued: the next one of that buffer, maybe for the
        next step."""
        place = self._at.get(layer)
        if place is not None:
            following, buffers = place + len(self._first), len(self._first)
            self._copy(following if following < len(self._at) else place % buffers)

    def _copy(self, place: int) -> None:
        if self._side is None:
            for host, here in self._pieces[place]:
                here.copy_(host)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for host, here in self._pieces[place]:
                here.copy_(host, non_blocking=True)
            self._copied[place] = copied = torch.cuda.Event()
            copied.record()

    def bytes_per_second(self) -> float:
        """Return the rate at which layers come, by copies to all buffers."""
        best, size = 0.0, sum(len(piece.host) for place in self._first for piece in self._pieces[place])
        for _ in range(3):
            self._synchronize()
            start = time.perf_counter()
            for place in self._first:
                self._copy(place)
            self._synchronize()
            best = max(best, size / max(time.perf_counter() - start, 1e-9))
        return best

    def _synchronize(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self._device)


def _bring(module: Linear | ExpertStack, device: torch.device) -> None:
    """Let a module be prepared on the device, unless it multiplies with what was loaded."""
    plain = module.scheme.name == "plain" and not (isinstance(module, Linear) and module.multipliers)
    if module.weight is not None and not plain:
        module.weight.data = module.weight.data.to(device)
    for filling in module.fillings:
        for tensor in filling.tensors.values():
            tensor.data = tensor.data.to(device)


def _pairs(module: Linear | ExpertStack, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors that a prepared module multiplies with, each with that whose numbers it has. What was loaded as
    plain numbers stays the module's parameter, on the host. Forms for a CPU's own code hold addresses, and stay where
    they are."""
    if module.weight is not None:
        if module.weight.device.type != "cpu":
            module.weight.data = _on_host(module.weight.data)
        here = torch.empty(0, dtype=module.weight.dtype, device=device)
        yield here, module.weight.data
        if isinstance(module, Linear):
            module.matrix = weight_of(module.ops, here)
        else:
            module.matrices = StackedWeights(module.ops, here)
        return
    form = module.matrix if isinstance(module, Linear) else module.matrices
    yield from ((each, each) for each in tensors_in(form, but=(Panels, ExpertPanels)) if not each.is_mkldnn)


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _room(host: Tensor) -> int:
    """Return the bytes that a piece of memory takes in a buffer."""
    return -(-len(host) // ALIGNMENT) * ALIGNMENT
