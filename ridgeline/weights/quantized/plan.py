"""The plan of a quantized checkpoint: which weights have which form, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import Source, WeightMap
from ridgeline.kernels.base.weight_format import BLOCK, CodedFormat, Fp8Format, Held, HeldMatrix
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.latent_attention import Expand
from ridgeline.layers.linear import Linear
from ridgeline.quantization.held import WHOLE, Filling
from ridgeline.weights.checkpoint import PLAIN
from ridgeline.weights.divided import Place
from ridgeline.weights.quantized.piece import Method, Piece, Stored
from ridgeline.weights.rows import divides_heads, in_our_order, our_shares
from ridgeline.weights.stored import StoredTensor

Pieces = Mapping[str, Piece]  # the name of a source → how it is stored
Forms = Mapping[str, HeldMatrix]  # by the names of the decoder's modules


def module_weights(stored: Stored) -> set[str]:
    """Return the weights that files may hold in tensors of other names, by the names that plain ones have."""
    modules = {f"{name.rpartition('.')[0]}.weight" for name in stored}
    return modules | {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}


def pieces_of(decoder: Decoder, weights: WeightMap, method: Method | None, stored: Stored | None) -> Pieces:
    """Return the quantized weights. A weight that lies in the files as plain numbers is none, whatever the config says.

    decoder: a plain one, for its shapes. stored: None where there are no files.
    """
    if method is None:
        return {}
    found: dict[str, Piece] = {}
    for module, owner, sources in matrices(decoder, weights, tied=method.tied):
        for source, rows in zip(sources, _rows(owner, sources), strict=True):
            plain = stored is not None and source.name in stored and stored[source.name].dtype in PLAIN
            shape = (len(owner.weight), rows, owner.inputs) if source.stacked else (rows, owner.inputs)
            piece = None if plain else method.piece(source.name.removesuffix(".weight"), shape, stored)
            if piece is not None:
                piece = piece if isinstance(owner, ExpertStack) else piece.alone()
                _check_order(module, source, rows, piece)
                found[source.name] = piece
    return found


def matrices(decoder: Decoder, weights: WeightMap, *, tied: bool) -> Iterator[tuple[str, Any, Sequence[Source]]]:
    """Yield the linear maps, stacks of experts and projections of latents that are loaded, with names and sources.

    tied: with the output layer that shares the embedding's table.
    """
    for parameter, sources in weights.items():
        module, _, kind = parameter.rpartition(".")
        owner = decoder.get_submodule(module)
        if kind == "weight" and isinstance(owner, (Linear, ExpertStack, Expand)):
            yield module, owner, sources
    if tied and decoder.spec.tie_word_embeddings and (decoder.spec.pooling is None or decoder.spec.scores):
        yield "unembed", decoder.unembed, weights["embed.weight"]


def _rows(owner: Any, sources: Sequence[Source]) -> Sequence[int]:
    """Return the outputs of each source."""
    if isinstance(owner, ExpertStack) and not sources[0].stacked:
        return owner.parts * (len(sources) // len(owner.parts))
    return owner.parts if len(sources) == len(owner.parts) else (sum(owner.parts),)


def _check_order(module: str, source: Source, rows: int, piece: Piece) -> None:
    how = None if piece.held is None else piece.held.format
    if not isinstance(how, Fp8Format) or not how.block:
        return
    if source.interleaved or source.alternating or not (source.heads is None or divides_heads(source, rows, BLOCK)):
        raise ModelLoadError(f"{source.name} has its rows in another order than {module}, which blocks of FP8 cross.")


def forms(decoder: Decoder, weights: WeightMap, pieces: Pieces) -> Forms:
    """Return the forms of the modules with quantized weights, by the modules' names.

    Stacks have one form for all experts and projections. Where files have several, weights are plain numbers.
    """
    found: dict[str, HeldMatrix] = {}
    for module, owner, sources in matrices(decoder, weights, tied=True):
        helds = tuple(pieces[source.name].held if source.name in pieces else None for source in sources)
        rows = tuple(_rows(owner, sources))
        if isinstance(owner, Linear):
            if any(helds):
                beside = module == "unembed" and decoder.spec.tie_word_embeddings
                found[module] = HeldMatrix(helds=helds, rows=rows, inputs=owner.inputs, beside=beside)
        elif isinstance(owner, Expand):
            continue  # which multiplies plain numbers
        elif len(set(helds)) == 1 and helds[0] is not None and _whole_blocks(owner, helds[0]):
            count = len(sources) if sources[0].stacked else len(owner.parts)
            one = (helds[0],) * count
            found[module] = HeldMatrix(helds=one, rows=rows[:count], inputs=owner.inputs, copies=len(owner.weight))
    return found


def _whole_blocks(stack: ExpertStack, held: Held) -> bool:
    block = isinstance(held.format, Fp8Format) and held.format.block
    return not block or not any(rows % BLOCK for rows in stack.parts[:-1])


def widened(weights: WeightMap, views: Mapping[str, list[int]], pieces: Pieces, stored: Stored) -> Stored:
    """Return the files' tensors, in which the pieces are plain tensors of the shapes that unquantized files have."""
    used = {name for piece in pieces.values() for name in piece.tensors}
    found = {name: tensor for name, tensor in stored.items() if name not in used}
    sources = {source.name: source for each in weights.values() for source in each}
    for name, piece in pieces.items():
        flip = sources[name].transpose

        def read(piece: Piece = piece, flip: bool = flip) -> Tensor:
            return _flipped(piece.numbers(lambda each: stored[each].read()), flip)

        def part(index: int, piece: Piece = piece, flip: bool = flip) -> Tensor:
            return _flipped(piece.numbers(partial(_part, stored, index)), flip)

        found[name] = StoredTensor(views[name], piece.label, read, part if sources[name].stacked else None)
    return found


def _flipped(numbers: Tensor, flip: bool) -> Tensor:
    return numbers.transpose(-1, -2) if flip else numbers


def _part(stored: Stored, index: int, name: str) -> Tensor:
    part = stored[name].part
    assert part is not None
    return part(index)


def targets(
    module: nn.Module,
    sources: Sequence[Source],
    pieces: Pieces,
    stored: Stored,
    view: Callable[[Tensor, Source], Tensor],
) -> Iterator[Place]:
    """Yield the tensors of a module that keeps the form of its files, each with the function that reads it.

    view: returns a part of a tensor in the order of a source.
    """
    assert isinstance(module, (Linear, ExpertStack))
    for filling in module.fillings:
        own = [replace(source, transpose=False) for source in _own(filling.parts, len(module.parts), sources)]
        for field, tensor in filling.tensors.items():
            if field in WHOLE:
                whole = partial(_shared, field, own, pieces, stored, tensor.shape)
                yield Place(tensor, whole, partial(_own_order, own[0].name, whole) if field == "order_I" else None)
                continue
            for source, part in zip(own, _split(filling, field, len(own)), strict=True):
                place = view(part, source)
                read = partial(_read, pieces.get(source.name), field, source, stored, place.shape)
                how = None if filling.held is None else filling.held.format
                planes = how.planes() if field == "code_OB" and isinstance(how, CodedFormat) else ()
                sliced = partial(_own_planes, read, planes) if len(planes) > 1 else None
                yield Place(place, read, sliced, fused_parts(module, sources, source))


def check_numbers(network: nn.Module, folder: Path) -> None:
    """Raise ModelLoadError if a weight that keeps the form of its files has E4M3 numbers that are NaN, which no kernel
    for them expects. Other codes have a value each. It reads each such weight twice, and waits for a GPU once."""
    names, found = list[str](), list[Tensor]()
    for name, module in network.named_modules():
        for filling in getattr(module, "fillings", ()):
            if (numbers := _floats_of(filling)) is not None and numbers.numel():
                names.append(name)  # NaN is 0x7f, the largest int8, or 0xff, the largest uint8
                largest = numbers.view(torch.int8).amax() == 127, numbers.view(torch.uint8).amax() == 255
                found.append(largest[0] | largest[1])
    bad = [name for name, flag in zip(names, _together(found), strict=True) if flag]
    if bad:
        more = f" and {len(bad) - 1} more weights" if len(bad) > 1 else ""
        raise ModelLoadError(f"{folder} holds numbers of {bad[0]}{more} that are NaN; copy it again.")


def _floats_of(filling: Filling) -> Tensor | None:
    """Return a weight's floats of eight bits, if it has such."""
    how = None if filling.held is None else filling.held.format
    if isinstance(how, Fp8Format):
        return filling.tensors["weight_OI"]
    return filling.tensors["code_OB"] if isinstance(how, CodedFormat) and how.values == "e4m3" else None


def _together(flags: Sequence[Tensor]) -> list[bool]:
    """Return flags on any devices, those of each device by one copy."""
    found = [False] * len(flags)
    for device in {flag.device for flag in flags}:
        own = [n for n, flag in enumerate(flags) if flag.device == device]
        for n, flag in zip(own, torch.stack([flags[n] for n in own]).tolist(), strict=True):
            found[n] = flag
    return found


def fused_parts(owner: nn.Module, sources: Sequence[Source], source: Source) -> Sequence[int] | None:
    """Return the sizes of the projections that one of a module's tensors in the files holds, in our order of rows below
    one another, if there are several."""
    if source.alternating:
        return None
    found: Sequence[int] = ()
    if len(sources) == 1:
        found = getattr(owner, "columns", getattr(owner, "parts", ()))
    elif isinstance(owner, Linear):
        found = owner.columns_of([each.name for each in sources].index(source.name))
    if len(found) == 1 and source.heads is not None:  # of one projection that the files hold as several
        shares = our_shares(source)
        found = [found[0] * share // sum(shares) for share in shares]
    return found if len(found) > 1 else None


def _own(parts: Mapping[int, int], count: int, sources: Sequence[Source]) -> list[Source]:
    """Return the sources of some of a module's projections."""
    if len(sources) <= count:
        return [sources[part] for part in parts]
    return [source for number, source in enumerate(sources) if number % count in parts]


def _split(filling: Filling, field: str, count: int) -> Sequence[Tensor]:
    """Return the parts of a field that so many sources fill."""
    parts = filling.rows(field)
    if count <= len(parts):
        return parts
    experts = [part.unbind() for part in parts]  # of files with one tensor for each expert
    return [part[expert] for expert in range(len(experts[0])) for part in experts]


def _read(piece: Piece | None, field: str, source: Source, stored: Stored, shape: torch.Size) -> Tensor:
    if piece is None:
        return in_our_order(stored[source.name].read().view(shape), source)
    return in_our_order(piece.read[field](lambda each: stored[each].read()).reshape(shape), source)


def _shared(field: str, sources: Sequence[Source], pieces: Pieces, stored: Stored, shape: torch.Size) -> Tensor:
    """Return the numbers that all outputs share, of which each source has its own: the largest scale of activations, or
    what must be the same in all of them."""
    found = [pieces[source.name].read[field](lambda each: stored[each].read()) for source in sources]
    single = 1 if field == "order_I" else 0
    if len(shape) == single:
        return _agreed(field, found, sources)
    each = len(found) // shape[0]
    groups = [range(first, first + each) for first in range(0, len(found), each)]
    return torch.stack([_agreed(field, [found[i] for i in group], [sources[i] for i in group]) for group in groups])


def _own_planes(read: Callable[[], Tensor], planes: Sequence[int], slices: tuple[slice, ...]) -> Tensor:
    """Return some of the inputs' codes, of which each plane holds a part."""
    rows, own = read()[slices[:-1]], slices[-1]
    width = rows.shape[-1] // sum(planes)  # bytes of a plane of one bit
    first, last = own.start // sum(planes), own.stop // sum(planes)
    starts = [width * sum(planes[:number]) for number in range(len(planes))]
    parts = [rows[..., start + first * bits : start + last * bits] for start, bits in zip(starts, planes, strict=True)]
    return torch.cat(parts, -1)


def _own_order(name: str, whole: Callable[[], Tensor], slices: tuple[slice, ...]) -> Tensor:
    """Return the order of some of the inputs: groups in another order than the inputs' would cross ranks."""
    order_I, own = whole(), slices[-1]
    if own == slice(0, len(order_I)):
        return order_I
    if not torch.equal(order_I, torch.arange(len(order_I), dtype=order_I.dtype)):
        raise ModelLoadError(
            f"{name} was quantized in an order of its inputs, which ranks would divide; quantize without desc_act, or "
            "leave tensor_parallel_size out."
        )
    return order_I[: own.stop - own.start]


def _agreed(field: str, found: Sequence[Tensor], sources: Sequence[Source]) -> Tensor:
    if field == "x_scale":
        return torch.stack(list(found)).amax(0)
    for tensor, source in zip(found, sources, strict=True):
        if not torch.equal(tensor, found[0]):
            what = "order of inputs" if field == "order_I" else "factor"
            one, other = (each.name.removesuffix(".weight") for each in (source, sources[0]))
            raise ModelLoadError(
                f"{one} has another {what} than {other}, with which it is multiplied as one; quantize them together."
            )
    return found[0]
