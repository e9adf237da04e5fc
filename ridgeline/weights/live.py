"""Weights that are replaced in place while an engine holds them, so that captured graphs go on with the new numbers.

The tensors come by the checkpoint's names and go into the parts of parameters that the loader would fill. Everything is
checked before the first number changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.layers.recurrent import DecayRate
from ridgeline.weights.loader import View, checkpoint_views, missing_offset, shortened
from ridgeline.weights.rows import in_our_order


class LivePlace(NamedTuple):
    """The part of a parameter that a tensor fills. offset: added to it, as the loader does."""

    view: View
    source: Source
    offset: float


class LiveWeights:
    """The weights of a decoder that is in use. Raise InvalidConfig if it holds them in another form than its files
    do."""

    def __init__(self, decoder: Decoder, weights: WeightMap) -> None:
        if not _is_plain(decoder):
            raise InvalidConfig(
                "weights are replaced in place only in models of one expert on one device, whose weights are plain "
                "numbers without multipliers; load the new ones from a folder."
            )
        self._decoder = decoder
        views = checkpoint_views(decoder, weights)
        self._places = {
            source.name: LivePlace(views[source.name], source, missing_offset(decoder, parameter, sources[0]))
            for parameter, sources in weights.items()
            for source in sources
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise InvalidConfig, in one sentence, unless each tensor has the name, the shape and a type of this model's.
        Tensors may be missing."""
        if unknown := sorted(tensors.keys() - self._places.keys()):
            raise InvalidConfig(f"this model has no weights called {shortened(unknown)}.")
        for name, tensor in tensors.items():
            wanted = self._places[name].view.shape
            if list(tensor.shape) != wanted:
                raise InvalidConfig(f"{name} has the shape {list(tensor.shape)}, and this model's has {wanted}.")
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise InvalidConfig(f"{name} holds {tensor.dtype}, and weights are float32, bfloat16 or float16.")

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the weights. Nothing may be under way. Raise InvalidConfig, before any number changes, as
        `check` does."""
        self.check(tensors)
        for name, tensor in tensors.items():
            (target, _), source, offset = self._places[name]
            target.copy_(in_our_order(tensor.view(target.shape), source))
            if offset:
                target.add_(offset)

    @torch.no_grad()
    def take(self, other: Decoder) -> None:
        """Copy the weights of a decoder of the same model and form. Nothing may be under way. Raise InvalidConfig,
        before any number changes, if it has others."""
        given, own = dict(other.named_parameters()), dict(self._decoder.named_parameters())
        pairs = [(each, given.get(name)) for name, each in own.items()]
        if any(new is None or new.shape != old.shape or new.dtype != old.dtype for old, new in pairs):
            raise InvalidConfig("the weights that are given have other names, shapes or types than the engine's.")
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs if new is not None])


def _is_plain(decoder: Decoder) -> bool:
    if isinstance(decoder, ForeignDecoder) or decoder.mesh.size > 1 or decoder.encoder is not None:
        return False
    norms = [layer.norm for layer in decoder.whole.layers]
    if any(norm.multiplier != 1 for norm in [*norms, decoder.whole.final_norm]):
        return False
    for module in decoder.modules():
        if isinstance(module, (Experts, ExpertStack, DecayRate)):
            return False
        multiplied = isinstance(module, Linear) and any(factor != 1 for _, factor in module.multipliers)
        if isinstance(module, Linear) and (module.weight is None or module.fillings or multiplied):
            return False
    return True
