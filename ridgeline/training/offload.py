"""Activations that wait in the host's memory for the backward pass, of some of the layers.

What autograd keeps of such a layer goes to page-locked memory on a stream of its own while the next layers run, and
comes back one layer ahead of the backward pass (vDNN, Rhu et al., arXiv 1602.08124, has the idea). The numbers are the
same, and so are all gradients.

    forward    layer i has run: its memory goes to the host | layer i + AHEAD begins behind that copy
    backward   layer i asks for its tensors: those of layer i - 1 come while its products run

The first layers are chosen, since theirs wait longest. All that a layer writes in one piece of memory travels as one
piece, so a view, and rows with room between them, come back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder

LEAST = 1 << 20  # bytes of a piece of memory that travels; smaller ones stay
AHEAD = 2  # layers whose memory is still on the device while it goes to the host


class KeptTensor(NamedTuple):
    """The thing that autograd holds in the place of a tensor. number: of its memory among that of the run. tensor:
    itself, if it stays."""

    run: LayerRun
    number: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tensor: Tensor | None = None


class LayerRun:
    """One run of a layer, and the memory of what it saved: bytes on the device while they leave (`leaving`), in the
    host's memory (`pages`), and on the device again (`back`).

    It ends with the last tensor that autograd keeps of it: runs do not hold each other, or all of a step would wait for
    Python's collector of cycles, which may let many steps go by.
    """

    def __init__(self, before: LayerRun | None) -> None:
        self._before: ref[LayerRun] | None = None if before is None else ref(before)
        self._after: ref[LayerRun] | None = None
        if before is not None:
            before._after = ref(self)
        self.numbers: dict[int, int] = {}
        self.leaving: list[Tensor] = []
        self.pages: list[Tensor] = []
        self.back: list[Tensor] = []
        self.gone: torch.cuda.Event | None = None
        self.here: torch.cuda.Event | None = None

    @property
    def before(self) -> LayerRun | None:
        """The run of the layer before, unless its backward pass is over."""
        return None if self._before is None else self._before()

    @property
    def after(self) -> LayerRun | None:
        """The run of the layer behind, unless its backward pass is over."""
        return None if self._after is None else self._after()

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a piece of memory, which leaves once however many tensors lie in it."""
        address = storage.data_ptr()
        if address not in self.numbers:
            self.numbers[address] = len(self.leaving)
            self.leaving.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return self.numbers[address]

    def let_go(self) -> None:
        """Give the device's memory back, behind the copy to the host."""
        if self.gone is not None:
            torch.cuda.current_stream(self.gone.device).wait_event(self.gone)
        self.leaving, self.gone = [], None


class OffloadedActivations:
    """The activations of a decoder's first layers, in the host's memory between their forward and backward pass.

    share: of the layers, from 0 to 1; above 0 it is at least one. least: bytes of a piece of memory that travels.
    num_bytes: what the last forward pass sent to the host.

    Raise InvalidConfig for another share, for a model that runs one layer at several places, and for one whose
    activations are offloaded already. On a CPU there is nothing to gain, and the same copies are made.
    """

    def __init__(self, decoder: Decoder, share: float, *, least: int = LEAST) -> None:
        if not 0 <= share <= 1:
            raise InvalidConfig(f"the share of layers whose activations are offloaded is from 0 to 1, got {share!r}.")
        layers = list(decoder.layers)
        if len(set(layers)) < len(layers):
            raise InvalidConfig(
                "the activations of a model that runs one layer at several places are not offloaded here."
            )
        owners = (getattr(getattr(each.forward, "func", None), "__self__", None) for each in layers)
        if any(isinstance(each, OffloadedActivations) for each in owners):
            raise InvalidConfig("the activations of this model are offloaded already; close that first.")
        self.count = max(1, round(share * len(layers))) if share else 0
        self.least, self.num_bytes = least, 0
        self._runs: list[LayerRun] = []
        self._stream: torch.cuda.Stream | None = None
        self._wrapped = layers[: self.count + AHEAD] if self.count else []
        self._own = [vars(layer).get("forward") for layer in self._wrapped]
        for place, layer in enumerate(self._wrapped):
            layer.forward = partial(self._forward, place, layer, layer.forward)

    def close(self) -> None:
        """Let the layers keep their activations again."""
        for layer, own in zip(self._wrapped, self._own, strict=False):
            if own is None:
                del layer.forward  # the attribute that hides the method
            else:
                layer.forward = own
        self._wrapped = []

    def _forward(self, place: int, layer: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        if place == 0:
            self._runs, self.num_bytes = [], 0
        elif place >= AHEAD:
            self._runs[place - AHEAD].let_go()
        run = LayerRun(self._runs[-1] if self._runs else None)
        self._runs.append(run)
        others = (*layer.parameters(), *layer.buffers(), *given[2:], *named.values())  # not what the layer before made
        held = {each.untyped_storage().data_ptr() for each in others if isinstance(each, Tensor)}
        travels = place < self.count
        try:
            with saved_tensors_hooks(partial(self._pack, run, held, travels), self._unpack):
                found = forward(*given, **named)
        except BaseException:
            self._runs = []  # else they would hold memory until the next step
            raise
        self._send(run)
        if place == len(self._wrapped) - 1:
            self._runs = []  # from here on autograd alone holds them, until their backward pass
        return found

    def _pack(self, run: LayerRun, held: set[int], travels: bool, x: Tensor) -> KeptTensor:
        """Return the thing that autograd keeps in the place of a tensor. Weights stay where they are."""
        view = x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride()
        storage = x.untyped_storage()
        stays = not travels or storage.nbytes() < self.least or storage.data_ptr() in held
        return KeptTensor(run, -1, *view, x) if stays else KeptTensor(run, run.number(storage), *view)

    def _send(self, run: LayerRun) -> None:
        """Begin the copies of a run to the host."""
        if not run.leaving:
            return
        self.num_bytes += sum(each.nbytes for each in run.leaving)
        device = run.leaving[0].device
        if device.type != "cuda":
            run.pages = [each.clone() for each in run.leaving]
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        run.pages = [torch.empty(each.shape, dtype=torch.uint8, pin_memory=True) for each in run.leaving]
        with torch.cuda.stream(self._stream):
            _copy(run.pages, run.leaving)
        run.gone = self._stream.record_event()

    def _unpack(self, kept: KeptTensor) -> Tensor:
        run, after, before = kept.run, kept.run.after, kept.run.before
        if after is not None:
            after.back = []  # its backward pass is over; what is asked for once more comes once more
        self._fetch(run)
        if before is not None:
            self._fetch(before)
        if kept.tensor is not None:
            return kept.tensor
        memory = run.back[kept.number]
        if run.here is not None:
            torch.cuda.current_stream(memory.device).wait_event(run.here)
        whole = memory.view(kept.dtype) if kept.dtype != torch.uint8 else memory
        return whole.as_strided(kept.shape, kept.strides, kept.offset)

    def _fetch(self, run: LayerRun) -> None:
        """Begin the copies of a run to the device, if they are not there."""
        if run.back or not run.pages:
            return
        if run.leaving:  # the last layers of a model: no further one has let their memory go
            run.back, run.leaving = run.leaving, []
            if self._stream is not None:  # whose copy may be under way when the backward pass is done with this
                for each in run.back:
                    each.record_stream(self._stream)
            return
        if self._stream is None:
            run.back = run.pages
            return
        device = self._stream.device
        # memory of the compute stream, behind whose work so far the copies wait: it may read what lay there
        run.back = [torch.empty(each.shape, dtype=torch.uint8, device=device) for each in run.pages]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy(run.back, run.pages)
        for each in run.back:  # a backward pass may end early, while copies are under way
            each.record_stream(self._stream)
        run.here = self._stream.record_event()


def _copy(to: Iterable[Tensor], of: Iterable[Tensor]) -> None:
    for new, old in zip(to, of, strict=True):
        new.copy_(old, non_blocking=True)
