"""Loading of one rank's part of a model: every place in its parameters gets its slice of the files' tensors.

Which slice that is follows from the shapes of the rank's decoder and of the whole model's (`core.plan.sharding.cut`),
so no layer needs to say it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.sharding import cut
from ridgeline.core.settings.together import TP
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.kernels.base.weight_format import BLOCK, SUPER, CodedFormat, Fp8Format
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.held import Filling
from ridgeline.weights.stored import StoredTensor

Slices = tuple[slice, ...]
Stored = Mapping[str, StoredTensor]
Read = Callable[[], Tensor]


class Place(NamedTuple):
    """A part of a parameter that one tensor of the files fills.

    tensor: a view of the parameter, in the order of the files.
    read: returns all of the files' tensor, in the shape of the whole model's place.
    sliced: returns only these slices of it. None where all of it has to be read.
    parts: the sizes of the fused projections in it, if there are several.
    """

    tensor: Tensor
    read: Read
    sliced: Callable[[Slices], Tensor] | None = None
    parts: Sequence[int] | None = None


def of_own_experts(
    weights: WeightMap, stored: Stored, decoder: Decoder, names_of: Callable[[str], Iterable[str]]
) -> tuple[WeightMap, Stored]:
    """Return the weight map and the files' tensors as if they held the experts of this rank alone.

    names_of: returns the tensors in which the files hold a source.
    """
    found, kept = dict(stored), dict(weights)
    for parameter, sources in weights.items():
        owner = parameter.rpartition(".")[0]
        module, mixture = decoder.get_submodule(owner), decoder.get_submodule(owner.rpartition(".")[0])
        if not isinstance(module, ExpertStack) or not isinstance(mixture, Experts):
            continue
        experts = mixture.spec.experts_of(decoder.mesh.of_experts.rank)
        if not sources[0].stacked:
            each = len(module.parts)
            kept[parameter] = tuple(source for e in experts for source in sources[e * each : (e + 1) * each])
            continue
        for source in sources:
            for name in names_of(source.name):
                found[name] = _some(stored[name], experts)
    return kept, found


def _some(stored: StoredTensor, experts: Sequence[int]) -> StoredTensor:
    """Return these entries of a tensor's first dimension."""
    part, sliced = stored.part, stored.sliced

    def read(slices: Slices) -> Tensor:
        within, *rest = slices
        wanted = experts[within]
        if sliced is None:
            return stored.read()[list(wanted)][(slice(None), *rest)]
        if isinstance(wanted, range):
            return sliced((slice(wanted.start, wanted.stop), *rest))
        return torch.cat([sliced((slice(expert, expert + 1), *rest)) for expert in wanted])

    return replace(
        stored,
        shape=[len(experts), *stored.shape[1:]],
        read=lambda: read((slice(None),)),
        part=None if part is None else lambda index: part(experts[index]),
        sliced=None if sliced is None else read,
    )


def whole_decoder(decoder: Decoder) -> Decoder:
    """Return the whole model whose part a rank's decoder is (or the whole stage of it), with weights in the same forms,
    on a device that allocates nothing. Where ranks divide the experts it has those of a rank."""
    modules = {name: each for name, each in decoder.named_modules() if isinstance(each, Linear | ExpertStack)}
    mesh, spec = decoder.mesh, decoder.mesh.stage_of(decoder.whole)
    return Decoder(
        mesh.with_own_experts(spec),
        decoder.ops,
        dtype=decoder.dtype,
        device=torch.device("meta"),
        max_positions=1,
        scheme_of=lambda name: modules[name].scheme,
    )


def own_sources(weights: WeightMap, decoder: Decoder, whole: Decoder) -> WeightMap:
    """Return the map with the heads that a rank has, where these have dimensions of their own."""
    found = {}
    for parameter, sources in weights.items():
        owner, all_of_it = (each.get_submodule(parameter.rpartition(".")[0]) for each in (decoder, whole))
        parts, wholes = (getattr(each, "parts", ()) for each in (owner, all_of_it))
        if parts == wholes:
            found[parameter] = sources
            continue
        if len(sources) == 1:
            parts, wholes = (sum(parts),), (sum(wholes),)
        each = zip(sources, parts, wholes, strict=False)  # experts have more sources than parts, and no heads
        shares = tuple(_share(source, part, total) for source, part, total in each)
        found[parameter] = shares + sources[len(shares) :]
    return found


def _share(source: Source, part: int, whole: int) -> Source:
    return source if source.interleaved is None else replace(source, interleaved=source.interleaved * part // whole)


def check_divided(decoder: Decoder, whole: Decoder) -> None:
    """Raise ModelLoadError if ranks would have to divide a group or a block of quantized weights between them."""
    modules = dict(decoder.named_modules())
    for name, each in whole.named_modules():
        if not isinstance(each, Linear | ExpertStack):
            continue
        own = modules[name]
        assert isinstance(own, Linear | ExpertStack)
        for filling in own.fillings:
            if own.inputs != each.inputs:
                _check_inputs(name, filling, own.inputs, decoder.tp.size)
            block = (
                filling.held is not None and isinstance(filling.held.format, Fp8Format) and filling.held.format.block
            )
            if block and own.parts != each.parts and any(rows % BLOCK for rows in _divided_rows(own, each, filling)):
                raise ModelLoadError(
                    f"{TP} {decoder.tp.size} divides blocks of {BLOCK} outputs of {name}; choose another number."
                )


def _divided_rows(own: Linear | ExpertStack, whole: Linear | ExpertStack, filling: Filling) -> Iterable[int]:
    """Return a rank's rows of all that ranks divide in a filling."""
    if isinstance(own, ExpertStack) or isinstance(whole, ExpertStack):
        return filling.parts.values()
    everything = sum(filling.parts.values()) == sum(own.parts)
    numbers = range(len(own.parts)) if everything else list(filling.parts)
    columns = zip(*([rows for n in numbers for rows in each.columns_of(n)] for each in (own, whole)), strict=True)
    return (rows for rows, all_of_them in columns if rows != all_of_them)


def _check_inputs(name: str, filling: Filling, inputs: int, tp: int) -> None:
    how = None if filling.held is None else filling.held.format
    unit = 1
    if isinstance(how, CodedFormat):
        unit = lcm(SUPER if how.nested else 1, how.group or 1, 8)
    elif isinstance(how, Fp8Format) and how.block:
        unit = BLOCK
    if inputs % unit:
        raise ModelLoadError(f"{TP} {tp} divides groups of {unit} inputs of {name}; choose another number.")


def divided(own: Iterable[Place], whole: Iterable[Place], rank: int, size: int) -> Iterator[tuple[Tensor, Read]]:
    """Yield the tensors to fill, each with the function that reads its slice.

    own, whole: the places of a rank's decoder, and those of the whole model in the same order.
    """
    for mine, all_of_it in zip(own, whole, strict=True):
        found = list(regions(mine, all_of_it, rank, size))
        if len(found) == 1 and found[0][0].shape != mine.tensor.shape:
            mine.tensor.detach().zero_()
        for tensor, slices in found:
            yield tensor, _reader(all_of_it, slices)


def _reader(place: Place, slices: Slices) -> Read:
    sliced = place.sliced
    if sliced is not None:
        return lambda: sliced(slices)
    return lambda: place.read()[slices]


def regions(mine: Place, whole: Place, rank: int, size: int) -> Iterator[tuple[Tensor, Slices]]:
    """Yield parts of a rank's place with their slices of the whole. A short last part leaves rows, which are zeros."""
    shape, own = tuple(whole.tensor.shape), tuple(mine.tensor.shape)
    differing = [dim for dim, (a, b) in enumerate(zip(shape, own, strict=True)) if a != b]
    if mine.parts is None or whole.parts is None or not differing or list(mine.parts) == list(whole.parts):
        slices = cut(shape, own, rank, size)
        counts = [each.stop - each.start for each in slices]
        yield mine.tensor[tuple(slice(count) for count in counts)], slices
        return
    [dim] = differing
    into = mine.tensor.split(_scaled(mine.parts, own[dim]), dim)
    start = 0
    for target, length in zip(into, _scaled(whole.parts, shape[dim]), strict=True):
        [within] = cut((length,), (target.shape[dim],), rank, size)
        rows = slice(start + within.start, start + within.stop)
        yield target, (*[slice(None)] * dim, rows, *[slice(None)] * (len(shape) - dim - 1))
        start += length


def _scaled(parts: Sequence[int], total: int) -> list[int]:
    """Return the parts in the units of a tensor that holds `total` of something for all of them."""
    return [part * total // sum(parts) for part in parts]
