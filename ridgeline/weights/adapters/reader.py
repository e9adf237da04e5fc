"""Adapters in PEFT's folders: adapter_config.json and adapter_model.safetensors.

All that a file says of itself is checked against the model before any tensor is made. The file is read once: what was
checked is what runs, and what its key names, even if another process writes to the folder meanwhile.

Legend:
    I  inputs of a module
    O  outputs of a module
    R  the adapter's rank there
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.adapters import TENSORS
from ridgeline.weights.adapters.config import AdapterConfig, read_adapter_config
from ridgeline.weights.adapters.content import MOST_HEADER, AdapterBytes, read_content
from ridgeline.weights.adapters.matching import Meant, meant_modules
from ridgeline.weights.adapters.places import EMBED, UNEMBED, ModulePlace, placed
from ridgeline.weights.adapters.stacks import ThinPair, stacked_pairs, with_stacks
from ridgeline.weights.checkpoint import PLAIN
from ridgeline.weights.loader import shortened

WIDEST = 8  # bytes of a number
MOST_SPARED = 0.75  # of a file's bytes are matrices, where these are views of them
LONGEST = 200  # letters of a name in a sentence
_PREFIX = "base_model.model."
_MATRICES, _VECTOR = ("lora_A.weight", "lora_B.weight"), "ia3_l"
_OF_ROWS = {"lora_embedding_A": _MATRICES[0], "lora_embedding_B": _MATRICES[1]}  # as tables of embeddings have them
_AFTER_MODULE = re.compile(r"\.(?:base_layer|lora_|token_adapter|weight|bias)")
_TOKENS = ".token_adapter.trainable_tokens_delta"
_MAGNITUDE = "lora_magnitude_vector"
_UP_BIAS = "lora_B.bias"
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('adapter_model.bin', weights_only=True), 'adapter_model.safetensors')\""
)


class EncoderPlaces(NamedTuple):
    """The modules of towers and listeners that are no places of adapters.

    closed, tables: places that settings would open, for the sentence of a refusal; tables are those of the vocabulary.
    unused: beginnings of the names of modules whose outputs nothing reads, such as a tower's last layers. What an
        adapter holds for them changes nothing, and is left out.
    """

    closed: Mapping[str, ModulePlace] = MappingProxyType({})
    unused: Sequence[str] = ()
    tables: Mapping[str, ModulePlace] = MappingProxyType({})

    def read(self, module: str) -> bool:
        """Return False if nothing reads what a module makes."""
        return not any(f".{each}" in f".{module}." for each in self.unused)


class Factors(NamedTuple):
    """The vector of one module that multiplies what it gets or gives, float32. One of both is None.

    input_1I: multiplies its inputs. output_O1: multiplies its outputs, in our order.
    added_O: is added to its outputs then; None: nothing.
    """

    place: ModulePlace
    input_1I: Tensor | None
    output_O1: Tensor | None
    added_O: Tensor | None = None


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter of one model.

    key: names its content, which prefix hashes depend on.
    pairs: of every module that it changes by products.
    factors: of every module that it changes by factors.
    replaced: the tensors that take the place of the model's own, by the checkpoint's names; float32.
    rows: the tokens whose rows of a table take the place of the model's own, and these rows, by the module's name.
    heads: those of them that are maps behind pooling, by the decoder's names.
    octets: page-locked memory in which some matrices lie; None: they lie in none.
    """

    key: str
    pairs: tuple[ThinPair, ...]
    factors: tuple[Factors, ...] = ()
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    octets: Tensor | None = None

    @property
    def nbytes(self) -> int:
        products = sum(pair.down_RI.nbytes + pair.up_OR.nbytes for pair in self.pairs)
        products += sum(tensor.nbytes for tensor in self.heads.values())
        return products + sum(tensor.nbytes for each in self.factors for tensor in each if isinstance(tensor, Tensor))

    @property
    def rank(self) -> int:
        """The largest rank of a module's product."""
        return max((pair.rank for pair in self.pairs), default=0)

    def own_rows(self, *, tied: bool) -> Mapping[str, tuple[tuple[int, ...], Tensor]]:
        """Return `rows` without those of an output layer for which the table's stand. tied: it is the table. Raise
        ModelLoadError if it is not, as they lack then."""
        found = dict[str, tuple[tuple[int, ...], Tensor]]()
        for module, rows in self.rows.items():
            if all(rows[1] is not other for _, other in found.values()):
                found[module] = rows
            elif not tied:
                raise ModelLoadError(
                    f"the adapter lacks the rows of {module[:LONGEST]} that its trainable_token_indices name; copy the "
                    "folder again."
                )
        return found

    def pinned(self) -> ReadAdapter:
        """Return the adapter in page-locked memory, from which a GPU copies by itself. All matrices have one piece of
        it: the driver takes as long for each piece, however small."""
        locked = None if self.octets is None else self.octets.untyped_storage().data_ptr()
        matrices = [each for pair in self.pairs for each in (pair.down_RI, pair.up_OR)]
        there = [each.untyped_storage().data_ptr() == locked for each in matrices]
        room = sum(_room(each) for each, is_there in zip(matrices, there, strict=True) if not is_there)
        buffer, start = torch.empty(room, dtype=torch.uint8, pin_memory=True), 0
        moved = list[Tensor]()
        for each, is_there in zip(matrices, there, strict=True):
            if is_there:
                moved.append(each)
                continue
            moved.append(buffer[start : start + each.nbytes].view(each.dtype).view(each.shape).copy_(each))
            start += _room(each)
        both = zip(self.pairs, moved[::2], moved[1::2], strict=True)
        pairs = [pair._replace(down_RI=down_RI, up_OR=up_OR) for pair, down_RI, up_OR in both]
        factors = (
            Factors(place, *(None if each is None else each.pin_memory() for each in both))
            for place, *both in self.factors
        )
        return replace(self, pairs=tuple(pairs), factors=tuple(factors), octets=None)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256


def read_adapter(
    folder: Path,
    places: Mapping[str, ModulePlace],
    *,
    most_rank: int,
    dtype: torch.dtype,
    factors: bool = False,
    most_replaced: int = 0,
    encoders: EncoderPlaces = EncoderPlaces(),
    page_locked: bool = False,
    known: str | None = None,
) -> ReadAdapter:
    """Return the adapter in a folder, in a dtype. Raise ModelLoadError, in one sentence, for a folder that is damaged,
    means another model, or asks for what is not here.

    places: those of the model's modules.
    factors: it may be IA3 or DoRA.
    most_replaced: the bytes of whole tensors (biases, modules that were saved) that it may have.
    encoders: what there is to know of towers.
    page_locked: read into memory from which a GPU copies by itself.
    known: the key that the folder had; if it has the same, its numbers are not looked at again.
    """
    bytes_per_rank = sum(each.map.inputs + each.outputs for each in places.values()) * WIDEST
    try:
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder; give the one that holds adapter_config.json.")
        config = read_adapter_config(folder, most_rank, factors=factors, replaces=most_replaced > 0)
        path = _tensors_of(folder)
        most_bytes = MOST_HEADER + most_rank * bytes_per_rank + most_replaced
        content = read_content(path, most_bytes, page_locked=page_locked)
    except OSError as error:
        raise ModelLoadError(f"{str(folder)[:LONGEST]} cannot be read ({error.strerror}); copy it again.") from error
    header = _plainly_named(path, content.header)
    if config.tokens and all(place.map.name not in (EMBED, UNEMBED) for place in places.values()):
        raise ModelLoadError(
            f"{folder} sets trainable_token_indices, and rows of single tokens need enable_lora_vocabulary; set that, "
            "or merge the adapter by `ridgeline convert --merge`."
        )
    if closed := [name for name in header if _is_closed(name, places, encoders)]:
        raise ModelLoadError(
            f"{path} holds {closed[0][:LONGEST]}, and adapters of embeddings and output layers need "
            "enable_lora_vocabulary; set that."
        )
    halves: tuple[str, ...] = (_VECTOR,) if config.ia3 else (*_MATRICES, _MAGNITUDE) if config.dora else _MATRICES
    halves += (_UP_BIAS,) if config.biased else ()
    whole = [name for name in header if most_replaced and not name.endswith(tuple(f".{each}" for each in halves))]
    modules = _modules({name: each for name, each in header.items() if name not in whole}, path, halves)
    modules = [module for module in modules if encoders.read(module)]
    places_of = {module: place for module in modules if (place := _placed(module, header, places)) is not None}
    if foreign := [module for module in modules if module not in places_of]:
        also = " (experts need enable_lora_experts)" if any(".experts" in module for module in foreign) else ""
        if not also and any(placed(module, encoders.closed) for module in foreign):
            also = " (towers and their projectors need enable_tower_connector_lora)"
        raise ModelLoadError(
            f"{path} adapts modules that this model lacks, or that adapters cannot change here: "
            f"{listed_modules(foreign)}{also}; give an adapter of this model's linear layers."
        )
    if len({place.source.name for place in places_of.values()}) < len(places_of):
        raise ModelLoadError(f"{path} holds matrices of one module under two names; copy it again.")
    meant = meant_modules(config, [module for module, place in places_of.items() if not place.is_stacked], folder)
    meant |= _meant_stacks(config, places_of, path)
    if odd := [module for module in modules if module not in meant]:
        raise ModelLoadError(
            f"{path} holds matrices of modules that its adapter_config.json does not mean: {listed_modules(odd)}."
        )
    of_tokens = [name for name in whole if name.endswith(_TOKENS)]
    rows = _rows(path, content, of_tokens, config, places)
    replaced = _replaced(path, content, [name for name in whole if name not in of_tokens])
    if config.ia3:
        return ReadAdapter(_key(config, content), (), tuple(_factors(path, content, header, places_of)), replaced, rows)
    for module, place in places_of.items():
        _check_shapes(path, module, header, place, meant[module])
        if (place.map.experts or place.map.name == EMBED) and (config.dora or config.biased):
            what = "experts" if place.map.experts else "a table of embeddings"
            raise ModelLoadError(f"{path} has {what} with use_dora or lora_bias; only plain LoRA of these is served.")
        for kind in (*((_MAGNITUDE,) if config.dora else ()), *((_UP_BIAS,) if config.biased else ())):
            _check_vector(path, _name(module, kind, header), header, place)
    addends = tuple(_addends(path, content, places_of, meant)) if config.biased else ()
    key = _key(config, content)
    pairs = tuple(with_stacks(_pairs(content, places_of, meant, dtype, seen=key == known)))
    used = sum(each.nbytes for pair in pairs for each in (pair.down_RI, pair.up_OR))
    if used < MOST_SPARED * len(content.octets):  # else views would hold all of the file in memory
        pairs = tuple(each._replace(down_RI=each.down_RI.clone(), up_OR=each.up_OR.clone()) for each in pairs)
        return ReadAdapter(key, pairs, addends, replaced, rows)
    return ReadAdapter(key, pairs, addends, replaced, rows, octets=content.octets if page_locked else None)


def _plainly_named(path: Path, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's entries, those of tables of embeddings with the names that other modules' matrices have."""
    found = dict[str, Any]()
    for name, each in named.items():
        module, _, kind = name.rpartition(".")
        plain = f"{module}.{_OF_ROWS[kind]}" if kind in _OF_ROWS else name
        if plain in found:
            raise ModelLoadError(f"{path} holds {plain[:LONGEST]} under two names; copy it again.")
        found[plain] = each
    return found


def _is_closed(name: str, places: Mapping[str, ModulePlace], encoders: EncoderPlaces) -> bool:
    """Return True for a tensor of a table that a setting would open."""
    module = _AFTER_MODULE.split(name.removeprefix(_PREFIX), maxsplit=1)[0]
    return bool(encoders.tables) and placed(module, places) is None and placed(module, encoders.tables) is not None


def _rows(
    path: Path, content: AdapterBytes, names: list[str], config: AdapterConfig, places: Mapping[str, ModulePlace]
) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Return the tokens that have rows of their own in a table, and these rows."""
    if not config.tokens and not names:
        return {}
    tensors, found, left = _loaded(content) if names else {}, {}, dict(config.tokens)
    for name in names:
        module = name.removeprefix(_PREFIX).removesuffix(_TOKENS)
        place = placed(module, places)
        ends = (each for each in left if module == each or module.endswith(f".{each}"))
        key = next(ends, "" if "" in left and place is not None and place.map.name == EMBED else None)
        if place is None or place.map.name not in (EMBED, UNEMBED) or key is None:
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]}, which its adapter_config.json does not mean by "
                "trainable_token_indices, or which this model cannot change; give an adapter of this model."
            )
        tokens, rows_NM = left.pop(key), tensors[name].float()
        size, width = (
            (place.map.inputs, place.outputs) if place.map.name == EMBED else (place.outputs, place.map.inputs)
        )
        if list(rows_NM.shape) != [len(tokens), width] or max(tokens) >= size or not rows_NM.isfinite().all():
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]} of shape {list(rows_NM.shape)} for {len(tokens)} tokens up to "
                f"{max(tokens)}, and this model has {size} rows of {width} finite numbers; it is an adapter of another "
                "model, or of one with added tokens."
            )
        found[module] = tokens, rows_NM
    for module, tokens in [*left.items()]:  # of a tied output layer PEFT saves none: they are those of the table
        place = placed(module, places)
        both = [rows for rows in found.values() if rows[0] == tokens]
        if place is not None and place.map.name == UNEMBED and both:
            found[module] = both[0]
            del left[module]
    if left:
        raise ModelLoadError(
            f"{path} lacks the rows of {listed_modules(list(left))} that its trainable_token_indices name; copy the "
            "folder again."
        )
    return found


def _replaced(path: Path, content: AdapterBytes, names: list[str]) -> dict[str, Tensor]:
    """Return whole tensors by the names that the checkpoint has for them."""
    if not names:
        return {}
    tensors, found = _loaded(content), dict[str, Tensor]()
    for name in names:
        numbers = tensors[name].float()
        if not numbers.isfinite().all():
            raise ModelLoadError(f"{path} holds numbers of {name[:LONGEST]} that are not finite; train it again.")
        found[name.removeprefix(_PREFIX).replace(".base_layer.", ".")] = numbers
    return found


def _placed(module: str, header: Mapping[str, Any], places: Mapping[str, ModulePlace]) -> ModulePlace | None:
    """Return the place of a module. PEFT names the matrices of a layer's experts by the module that has them all, and
    has what it adapts first below "base_layer"; only their shapes say which matrices they are."""
    if (place := placed(module, places)) is not None or ".experts" not in module:
        return place
    shape = [header[name]["shape"] for name in _names(module, header) if name in header]
    owner = module.removesuffix(".base_layer")
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        place = placed(f"{owner}.{name}", places)
        if place is not None and [shape[0][1:], shape[-1][:1]] == [[place.map.inputs], [sum(place.map.parts)]]:
            return place
    return None


def _meant_stacks(config: AdapterConfig, known: Mapping[str, ModulePlace], path: Path) -> dict[str, Meant]:
    """Return the rank and the scale of all experts' matrices that the config means."""
    found = dict[str, Meant]()
    for module, place in known.items():
        if not place.is_stacked:
            continue
        name = "down_proj" if place.map.name.endswith(".down") else "gate_up_proj"
        named = (f"{module.removesuffix('.base_layer')}.{each}" for each in (name, "up_proj"))
        if any(full == each or full.endswith(f".{each}") for full in named for each in config.parameters):
            found[module] = Meant(config.rank, config.scale(config.rank, config.alpha))
    if found and (config.ranks or config.alphas):
        raise ModelLoadError(f"{path} has rank_pattern or alpha_pattern beside target_parameters; train it without.")
    return found


def listed_modules(modules: list[str]) -> str:
    """Return names of modules for a sentence."""
    return shortened([module[:LONGEST] for module in modules])


def _tensors_of(folder: Path) -> Path:
    path = folder / TENSORS
    if path.is_file():
        return path
    if (folder / "adapter_model.bin").exists():
        raise ModelLoadError(
            f"{folder} holds adapter_model.bin, a pickle that could run code; convert it there with: {_CONVERT}"
        )
    raise ModelLoadError(f"{folder} holds no {TENSORS}; give the folder that PEFT saved.")


def _modules(header: Mapping[str, Any], path: Path, wanted: tuple[str, ...]) -> list[str]:
    """Return the modules of which a file has all tensors. Raise ModelLoadError for tensors of other kinds."""
    halves: dict[str, set[str]] = {}
    for name in header:
        end = next((end for end in wanted if name.endswith(f".{end}")), None)
        if end is None:
            kinds = " and ".join(each.removesuffix(".weight") for each in wanted)
            raise ModelLoadError(
                f"{path} holds {name[:99]}, and only {kinds} of linear layers are served; merge the adapter "
                "into the model's weights, or train it without."
            )
        module, half = name.removeprefix(_PREFIX).removesuffix(f".{end}"), end
        found = halves.setdefault(module, set())
        if half in found:
            raise ModelLoadError(f"{path} holds {half} of {module[:LONGEST]} under two names; copy it again.")
        found.add(half)
    if not halves:
        raise ModelLoadError(f"{path} holds no tensors; copy it again.")
    if lone := [module for module, found in halves.items() if len(found) < len(wanted)]:
        raise ModelLoadError(f"{path} holds one of two matrices of {listed_modules(lone)}; copy it again.")
    return list(halves)


def _names(module: str, header: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of a module's two tensors."""
    before = _PREFIX if f"{_PREFIX}{module}.lora_A.weight" in header else ""
    return f"{before}{module}.lora_A.weight", f"{before}{module}.lora_B.weight"


def _check_shapes(path: Path, module: str, header: Mapping[str, Any], place: ModulePlace, meant: Meant) -> None:
    rank = meant.rank * (place.map.experts if place.is_stacked else 1)
    wanted = [rank, place.map.inputs], [sum(place.map.parts) if place.is_stacked else place.outputs, rank]
    for name, shape in zip(_names(module, header), wanted, strict=True):
        if (found := header[name]["shape"]) != shape:
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]} of shape {str(found)[:LONGEST]}, and this model with rank {meant.rank} "
                f"wants {shape}; it is an adapter of another model, or its config is."
            )
        if header[name]["dtype"] not in PLAIN:
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]} as {header[name]['dtype'][:20]}; save it as plain numbers."
            )


def _name(module: str, kind: str, header: Mapping[str, Any]) -> str:
    """Return the name of a module's tensor of this kind."""
    return next(name for name in (f"{_PREFIX}{module}.{kind}", f"{module}.{kind}") if name in header)


def _check_vector(path: Path, name: str, header: Mapping[str, Any], place: ModulePlace) -> None:
    if header[name]["shape"] != [place.outputs] or header[name]["dtype"] not in PLAIN:
        raise ModelLoadError(
            f"{path} holds {name[:LONGEST]} of shape {str(header[name]['shape'])[:LONGEST]} as "
            f"{header[name]['dtype'][:20]}, and this model wants [{place.outputs}] plain numbers."
        )


def _loaded(content: AdapterBytes) -> dict[str, Tensor]:
    return _plainly_named(content.path, content.tensors(content.header))


def _pairs(
    content: AdapterBytes,
    known: Mapping[str, ModulePlace],
    meant: Mapping[str, Meant],
    dtype: torch.dtype,
    *,
    seen: bool,
) -> list[ThinPair]:
    """Return the matrices of modules. Those that are in our form already stay where they were read. seen: all numbers
    are known to be finite."""
    found, tensors, path = list[ThinPair](), _loaded(content), content.path
    for module, place in known.items():
        down_RI, up_OR = (tensors.pop(name) for name in _names(module, tensors))
        if place.is_stacked:
            found += stacked_pairs(path, place, down_RI.to(dtype), (up_OR.float() * meant[module].scale).to(dtype))
            continue
        scale = meant[module].scale
        if not place.as_stored or up_OR.dtype != dtype:
            up_OR = place.in_our_order(up_OR.float()) * scale
        elif scale != 1:
            up_OR.mul_(scale)  # the same bits: the product is rounded once
        magnitude_O = None
        if f"{_PREFIX}{module}.{_MAGNITUDE}" in tensors or f"{module}.{_MAGNITUDE}" in tensors:
            stored_O1 = tensors.pop(_name(module, _MAGNITUDE, tensors)).float()[:, None]
            magnitude_O = replace(place, factor_O=None).in_our_order(stored_O1)[:, 0]
            magnitude_O = magnitude_O if place.factor_O is None else magnitude_O * place.factor_O.abs()
        pair = ThinPair(place, down_RI.to(dtype).contiguous(), up_OR.to(dtype).contiguous(), magnitude_O)
        if not seen and not all(_is_finite(each) for each in pair[1:] if isinstance(each, Tensor)):
            raise ModelLoadError(
                f"{path} holds numbers of {module} that are not finite in {str(dtype).removeprefix('torch.')}; train "
                "it again, or choose a wider dtype."
            )
        found.append(pair)
    return found


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all numbers are finite. A sum of finite ones nearly always is, and is read once."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _addends(
    path: Path, content: AdapterBytes, known: Mapping[str, ModulePlace], meant: Mapping[str, Meant]
) -> Iterator[Factors]:
    """Yield what biases of thin maps add to outputs."""
    tensors = _loaded(content)
    for module, place in known.items():
        bias_O1 = tensors[_name(module, _UP_BIAS, tensors)].float()[:, None] * meant[module].scale
        if not bias_O1.isfinite().all():
            raise ModelLoadError(f"{path} holds numbers of {module[:LONGEST]} that are not finite; train it again.")
        yield Factors(place, None, None, place.in_our_order(bias_O1)[:, 0])


def _factors(
    path: Path, content: AdapterBytes, header: Mapping[str, Any], known: Mapping[str, ModulePlace]
) -> Iterator[Factors]:
    tensors = _loaded(content)
    for module, place in known.items():
        name = f"{_PREFIX}{module}.{_VECTOR}" if f"{_PREFIX}{module}.{_VECTOR}" in header else f"{module}.{_VECTOR}"
        of_inputs = header[name]["shape"] == [1, place.map.inputs]
        if not of_inputs and header[name]["shape"] != [place.outputs, 1]:
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]} of shape {str(header[name]['shape'])[:LONGEST]}, and this model wants "
                f"[1, {place.map.inputs}] or [{place.outputs}, 1]; it is an adapter of another model."
            )
        if header[name]["dtype"] not in PLAIN:
            raise ModelLoadError(
                f"{path} holds {name[:LONGEST]} as {header[name]['dtype'][:20]}; save it as plain numbers."
            )
        if of_inputs and len(place.map.parts) > 1:
            raise ModelLoadError(
                f"{path} multiplies the inputs of {module[:LONGEST]}, which other projections get too; that is not "
                "here yet, so merge the adapter by PEFT."
            )
        vector = tensors[name].float().contiguous()
        if not vector.isfinite().all():
            raise ModelLoadError(f"{path} holds numbers of {module[:LONGEST]} that are not finite; train it again.")
        ours = None if of_inputs else replace(place, factor_O=None).in_our_order(vector)  # what multiplies commutes
        yield Factors(place, vector if of_inputs else None, ours)


def _key(config: AdapterConfig, content: AdapterBytes) -> str:
    """Return a name of an adapter's content."""
    digest = blake2b(repr(config).encode(), digest_size=16)
    digest.update(content.digest)
    return f"adapter {digest.hexdigest()}"
