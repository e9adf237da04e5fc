"""Weights that are replaced in place while an engine holds them, so that captured graphs go on with the new numbers.

The tensors come by the checkpoint's names and go into the parts of parameters that the loader would fill. Everything is
checked before the first number changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.stages import weights_of_stage
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.layers.recurrent import DecayRate
from ridgeline.quantization.plain import PLAIN
from ridgeline.quantization.weight import FormedWeight
from ridgeline.weights.divided import Place, Slices, own_sources, regions, whole_decoder
from ridgeline.weights.loader import checkpoint_views, empty_decoder, missing_offset, shortened
from ridgeline.weights.quantized.plan import fused_parts
from ridgeline.weights.rows import in_our_order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LivePlace(NamedTuple):
    """The parts of a parameter that a tensor fills.

    shape: of the whole model's place. parts: each with the slices of the tensor that it gets. offset: added to them, as
        the loader does.
    """

    shape: torch.Size
    source: Source
    parts: list[tuple[Tensor, Slices]]
    offset: float


class LiveWeights:
    """The weights of a decoder that is in use, or a rank's share of them. Raise InvalidConfig if it holds them in
    another form than its files do."""

    def __init__(self, decoder: Decoder, weights: WeightMap) -> None:
        if not _is_plain(decoder):
            raise InvalidConfig(
                "weights are replaced in place only in models of one expert, whose weights are plain numbers without "
                "multipliers; load the new ones from a folder."
            )
        self._decoder = decoder
        views = checkpoint_views(empty_decoder(decoder.whole), weights)
        self._shapes = {name: view.shape for name, view in views.items()}
        self._own = weights_of_stage(weights, decoder.spec)
        self._whole = decoder if decoder.mesh.of_experts.size == 1 else whole_decoder(decoder)
        divided = self._whole is not decoder
        self._shares = own_sources(self._own, decoder, self._whole) if divided else self._own
        self._known = dict[str, list[tuple[str, LivePlace]]]()  # those of parameters that stay where they are

    @contextmanager
    def _opened(self, names: Collection[str]) -> Iterator[list[tuple[str, LivePlace]]]:
        """Yield the places of these tensors in this rank's parameters. Matrices that are packed for a CPU are unpacked
        meanwhile."""
        packed = dict[str, Linear]()
        found: list[tuple[str, LivePlace]] = []
        tied = self._decoder.spec.tie_word_embeddings and "unembed.weight" not in self._own
        for parameter, sources in self._own.items():
            if not any(source.name in names for source in sources):
                continue
            owner = parameter.rpartition(".")[0]
            for each in (owner, *(["unembed"] if tied and owner == "embed" else [])):
                module = self._decoder.get_submodule(each)
                if isinstance(module, Linear) and module.matrix.stored.is_mkldnn:
                    packed[each] = module
                    tied_here = each != owner
                    module.weight = self._decoder.embed.weight if tied_here else _unpacked(module)
            places = self._known.get(parameter)
            if places is None:
                places = self._places(parameter)
                if owner not in packed:
                    self._known[parameter] = places
            found += [(name, place) for name, place in places if name in names]
        yield found
        for module in packed.values():
            module.prepare()

    def _places(self, parameter: str) -> list[tuple[str, LivePlace]]:
        decoder, whole, sources = self._decoder, self._whole, self._own[parameter]
        offset = missing_offset(decoder, parameter, sources[0])
        theirs = _places(whole, parameter, sources)
        ours = theirs if whole is decoder else _places(decoder, parameter, self._shares[parameter])
        return [
            (
                source.name,
                LivePlace(
                    all_of_it.tensor.shape,
                    source,
                    list(regions(mine, all_of_it, decoder.tp.rank, decoder.tp.size)),
                    offset,
                ),
            )
            for source, mine, all_of_it in zip(sources, ours, theirs, strict=True)
        ]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise InvalidConfig, in one sentence, unless each tensor has the name, the shape and a type of this model's.
        Tensors may be missing."""
        self.check_shapes({name: tuple(each.shape) for name, each in tensors.items()})
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise InvalidConfig(f"{name} holds {tensor.dtype}, and weights are float32, bfloat16 or float16.")

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InvalidConfig, in one sentence, unless each name and its shape are of this model, which several ranks
        may divide. Names may be missing."""
        if unknown := sorted(name[:200] for name in shapes.keys() - self._shapes.keys()):
            raise InvalidConfig(f"this model has no weights called {shortened(unknown)}.")
        for name, shape in shapes.items():
            if list(shape) != (wanted := list(self._shapes[name])):
                raise InvalidConfig(f"{name} has the shape {list(shape)}, and this model's has {wanted}.")

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors, or a rank's share of them, into the weights. Nothing may be under way. Raise InvalidConfig,
        before any number changes, as `check` does."""
        self.check(tensors)
        with self._opened(tensors.keys()) as places:
            for name, (shape, source, parts, offset) in places:
                ordered = in_our_order(tensors[name].view(shape), source)
                for target, slices in parts:
                    target.copy_(ordered[slices])
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


def _places(decoder: Decoder, parameter: str, sources: Sequence[Source]) -> list[Place]:
    """Return the place of each source of a parameter."""
    owner = decoder.get_submodule(parameter.rpartition(".")[0])
    views = checkpoint_views(decoder, {parameter: tuple(sources)})
    return [
        Place(views[each.name].tensor, views[each.name].tensor.detach, None, fused_parts(owner, sources, each))
        for each in sources
    ]


def _is_plain(decoder: Decoder) -> bool:
    if isinstance(decoder, ForeignDecoder) or decoder.encoder is not None:
        return False
    norms = [layer.norm for layer in decoder.whole.layers]
    if any(norm.multiplier != 1 for norm in [*norms, decoder.whole.final_norm]):
        return False
    for module in decoder.modules():
        if isinstance(module, (Experts, ExpertStack, DecayRate)):
            return False
        multiplied = isinstance(module, Linear) and any(factor != 1 for _, factor in module.multipliers)
        if isinstance(module, Linear) and (multiplied or not _is_plain_matrix(module)):
            return False
    return True


def _is_plain_matrix(module: Linear) -> bool:
    if module.fillings or module.scheme is not PLAIN:
        return False
    return module.weight is not None or (isinstance(module.matrix, FormedWeight) and module.matrix.stored.is_mkldnn)


def _unpacked(module: Linear) -> nn.Parameter:
    return nn.Parameter(module.matrix.stored.to_dense(), requires_grad=False)
