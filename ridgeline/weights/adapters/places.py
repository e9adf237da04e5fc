"""The linear maps of a model that adapters can change, by the names of the checkpoint's modules.

It is the model's weight map that says which of our fused maps a module is a part of, so adapters work for every family
whose weights are loaded by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.layers.attention import Attention
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.multiplied import factors
from ridgeline.weights.loader import empty_decoder, stored_view
from ridgeline.weights.rows import in_our_order, in_their_order, reorders

LAYERS = "layers.", "encoder.layers."  # in front of the names of layers' maps, and of those of an encoder's layers
HEAD = "head."  # in front of the names of maps behind pooling
EMBED, UNEMBED = "embed", "unembed"  # the table of the tokens, and the output layer
ENCODERS = "tower.", "listener."  # in front of those of what sees pictures or hears sounds, with its projector
Found = TypeVar("Found")
# Names of one module: of a text model inside a larger one, and of feed-forwards in Kimi Linear
_OTHER_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.language_model.", "language_model.model."),
    (".block_sparse_moe.", ".mlp."),
)


@dataclass(frozen=True)
class AdaptedMap:
    """One of our linear maps, or one matrix of every expert of a layer.

    parts: the outputs of each module that it is made of.
    experts: how many experts there are; 0: it is no experts'.
    """

    name: str
    inputs: int
    parts: tuple[int, ...]
    experts: int = 0


@dataclass(frozen=True)
class ModulePlace:
    """The place of a checkpoint's module: a part of one of our linear maps.

    source: says in which order the checkpoint has the module's rows.
    factor_O: what our outputs are multiplied by; None: nothing.
    expert: the number of the expert whose module it is; None: it is no expert's, or all experts' in one tensor.
    """

    map: AdaptedMap
    part: int
    source: Source
    factor_O: Tensor | None
    expert: int | None = None

    @property
    def outputs(self) -> int:
        return self.map.parts[self.part]

    def all_experts(self, part: int) -> ModulePlace:
        """Return the place of a part of all experts' matrices."""
        return replace(self, part=part, expert=None)

    @property
    def is_stacked(self) -> bool:
        """True for all experts' matrices in one tensor."""
        return self.map.experts > 0 and self.expert is None

    @property
    def first(self) -> int:
        """The first of the map's outputs that are the module's."""
        return sum(self.map.parts[: self.part])

    @property
    def as_stored(self) -> bool:
        """True if `in_our_order` changes nothing."""
        source = self.source
        plain = source.interleaved is None and not source.alternating and not reorders(source)
        return plain and self.factor_O is None

    def in_our_order(self, up_OR: Tensor) -> Tensor:
        """Return a matrix with the rows of the module's outputs as our map has them, multiplied as they are."""
        source = replace(self.source, transpose=False)
        ours_OR = torch.empty_like(up_OR)
        view = stored_view(ours_OR, source)
        view.copy_(in_our_order(up_OR, source).view(view.shape))
        return ours_OR if self.factor_O is None else ours_OR * self.factor_O[:, None]

    def in_their_order(self, up_OR: Tensor) -> Tensor:
        """Return the inverse of `in_our_order`."""
        source = replace(self.source, transpose=False)
        plain_OR = up_OR if self.factor_O is None else up_OR / self.factor_O[:, None]
        return in_their_order(stored_view(plain_OR, source), source).reshape(up_OR.shape)


def adaptable(spec: ModelSpec, weights: WeightMap) -> dict[str, ModulePlace]:
    """Return the place of every module that adapters can change, by the module's name in the checkpoint. These are the
    linear maps of layers; experts' matrices, embeddings and heads are others."""
    return places_in(empty_decoder(spec), weights)


def places_in(decoder: Decoder, weights: WeightMap, under: str | tuple[str, ...] = LAYERS) -> dict[str, ModulePlace]:
    """Return `adaptable` of a decoder, which may be a rank's part of a model. under: what may stand in front of the
    maps' names."""
    found = dict[str, ModulePlace]()
    for parameter, sources in weights.items():
        name, _, kind = parameter.rpartition(".")
        owner = decoder.get_submodule(name) if kind == "weight" and parameter.startswith(under) else None
        if not isinstance(owner, Linear) or _multiplies_distances(decoder, name):
            continue
        parts = owner.parts if len(sources) > 1 else (sum(owner.parts),)
        whole = AdaptedMap(name, owner.inputs, parts)
        factor_O = factors(owner.multipliers, torch.device("cpu"))
        ends = list(accumulate(parts, initial=0))
        for part, source in enumerate(sources):
            own = None if factor_O is None else factor_O[ends[part] : ends[part + 1]]
            found[source.name.removesuffix(".weight")] = ModulePlace(whole, part, source, own)
    return found


def with_head(weights: WeightMap) -> WeightMap:
    """Return a weight map in which the output layer has a source of its own. Where it is the table of the tokens, no
    file has it; adapters name it as transformers does."""
    own = {} if "unembed.weight" in weights else {"unembed.weight": (Source(name="lm_head.weight"),)}
    return {**weights, **own}


def vocabulary_places(decoder: Decoder, weights: WeightMap) -> dict[str, ModulePlace]:
    """Return the places of the table of the tokens, whose inputs are its rows, and of the output layer, as far as a
    decoder, which may be a rank's part of a model, has them. weights: as `with_head` returns them."""
    found = dict[str, ModulePlace]()
    for name in EMBED, UNEMBED:
        owner, sources = getattr(decoder, name, None), weights.get(f"{name}.weight", ())
        if owner is None or len(sources) != 1 or sources[0].transpose or decoder.whole.extra_rows:
            continue
        coded = isinstance(decoder.whole.tower, CodedTowerSpec)  # pictures become tokens in front of a step
        if name == EMBED and (decoder.encoder is not None or coded):  # these read the same table
            continue
        assert isinstance(owner, Embedding | Linear)
        inputs, parts = (owner.inputs, owner.parts) if isinstance(owner, Linear) else (len(owner.weight), None)
        whole = AdaptedMap(name, inputs, parts or (owner.weight.shape[1],))  # type: ignore[union-attr]
        found[sources[0].name.removesuffix(".weight")] = place = ModulePlace(whole, 0, sources[0], None)
        if name == UNEMBED:
            for usual in "lm_head", "proj_out":  # transformers' names, whatever files say
                found.setdefault(usual, place)
    return found


def foreign_places(decoder: ForeignDecoder) -> dict[str, ModulePlace]:
    """Return the places of the linear modules of a class of transformers, by their names there."""
    return {
        name: ModulePlace(
            AdaptedMap(name, each.in_features, (each.out_features,)), 0, Source(name=f"{name}.weight"), None
        )
        for name, each in decoder.linears.items()
    }


def linear_of(decoder: Decoder, name: str) -> nn.Module:
    """Return the module of an `AdaptedMap`: ours, or one of a class of transformers."""
    return decoder.linears[name] if isinstance(decoder, ForeignDecoder) else decoder.get_submodule(name)


def encoder_places(decoder: Decoder, weights: WeightMap) -> dict[str, ModulePlace]:
    """Return the places of the linear maps of a tower or a listener, projectors included. Kernels of convolutions that
    are read as matrices are none, nor are maps that clip, and those of poolers, which files hold as one tensor."""
    found = dict[str, ModulePlace]()
    for under in ENCODERS:
        plain = {
            name: sources
            for name, sources in weights.items()
            if name.startswith(under) and not any(each.kernel or each.row or each.zeros for each in sources)
        }
        found |= places_in(decoder, plain, under)
    return {name: place for name, place in found.items() if not _is_fixed(decoder, place.map.name)}


def _is_fixed(decoder: Decoder, name: str) -> bool:
    """Return True for an encoder's map that adapters cannot change: their products would pass by its clips."""
    linear = decoder.get_submodule(name)
    return name.startswith("tower.pooler.") or (isinstance(linear, Linear) and linear.clips is not None)


def unused_of(encoders: Mapping[str, ModulePlace], unused: Iterable[str]) -> tuple[str, ...]:
    """Return those beginnings of names that are of the same tower or listener as some of these places."""
    roots = {_root(name) for name in encoders}
    return tuple(each for each in unused if _root(each) in roots)


def _root(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def expert_places(decoder: Decoder, weights: WeightMap) -> dict[str, ModulePlace]:
    """Return the places of experts' modules by the names that checkpoints have for them, and of all experts together by
    those of PEFT's parameters: "….experts.gate_up_proj" and "….experts.down_proj"."""
    found = dict[str, ModulePlace]()
    for parameter, sources in weights.items():
        name, _, kind = parameter.rpartition(".")
        owner = decoder.get_submodule(name) if kind == "weight" and parameter.startswith("layers.") else None
        if not isinstance(owner, ExpertStack):
            continue
        decoder_parts = len(owner.parts)
        each = 0 if sources[0].stacked else len(sources) // decoder_parts
        experts = _experts_of(decoder, name)
        whole = AdaptedMap(name, owner.inputs, owner.parts, experts)
        for number, source in enumerate(sources[: each * decoder_parts]):
            expert, part = divmod(number, decoder_parts)
            found[source.name.removesuffix(".weight")] = ModulePlace(whole, part, source, None, expert)
        module = sources[0].name.partition(".experts.")[0]
        together = "down_proj" if name.endswith(".down") else "gate_up_proj" if decoder_parts == 2 else "up_proj"
        found[f"{module}.experts.{together}"] = ModulePlace(whole, 0, sources[0], None)
    return found


def _experts_of(decoder: Decoder, name: str) -> int:
    mixture = decoder.get_submodule(name.rpartition(".")[0])
    assert isinstance(mixture, Experts)
    return mixture.spec.stacked


def _multiplies_distances(decoder: Decoder, name: str) -> bool:
    """Return True for a projection that multiplies vectors of distances too, which all tokens of a step share."""
    attention = decoder.get_submodule(name.rpartition(".")[0])
    return (
        isinstance(attention, Attention)
        and attention.qkv is decoder.get_submodule(name)
        and bool(attention.spec.disentangled)
    )


def placed(module: str, places: Mapping[str, Found]) -> Found | None:
    """Return the entry with the name that an adapter has for a module, or None. Adapters of a model without its head
    leave out the first word of names, or have one more."""
    for theirs, ours in ("", ""), *_OTHER_NAMES:
        for one, other in (theirs, ours), (ours, theirs):
            if (place := places.get(module.replace(one, other, 1) if one else module)) is not None:
                return place
    first, _, rest = module.partition(".")
    if (place := places.get(rest)) is not None:
        return place
    roots = {name.partition(".")[0] for name in places} - {first}
    return next((places[name] for root in sorted(roots) if (name := f"{root}.{module}") in places), None)
