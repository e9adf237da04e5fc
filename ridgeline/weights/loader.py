"""Loading of a model's files into parameters.

Checkpoint tensors are copied and cast straight into their part of the (fused) parameter, on whatever device that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.stages import weights_of_stage
from ridgeline.core.settings.model import ModelSettings
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.spec import foreign_config
from ridgeline.kernels.base.kv_format import KVFormat
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.models import known, model_config
from ridgeline.models.config import ModelConfig
from ridgeline.models.pooling import pooled
from ridgeline.models.texts import texts_alone, towers_alone
from ridgeline.perf.footprint import parameters
from ridgeline.quantization.held import fill_random
from ridgeline.weights.checkpoint import LOADABLE, PLAIN, open_checkpoint
from ridgeline.weights.divided import Place, check_divided, divided, of_own_experts, own_sources, whole_decoder
from ridgeline.weights.folder import resolve_model as resolve_model
from ridgeline.weights.formats.gguf_file import is_gguf, read_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.mistral_files import folder_config
from ridgeline.weights.gguf.config import ROPE_FACTORS, gguf_model_config
from ridgeline.weights.gguf.names import gguf_weights
from ridgeline.weights.modules import cross_encoder, first_colbert, read_modules, token_id
from ridgeline.weights.quantized.config import folder_method, method_of, quantization_config
from ridgeline.weights.quantized.kv_scales import KV_SCALES, cached_as, check_kv_scales, kv_scale_places
from ridgeline.weights.quantized.piece import Method, Stored
from ridgeline.weights.quantized.plan import (
    Forms,
    Pieces,
    check_numbers,
    forms,
    fused_parts,
    matrices,
    module_weights,
    pieces_of,
    targets,
    widened,
)
from ridgeline.weights.quantized.rounded import Rounding
from ridgeline.weights.rows import in_our_order, in_their_order, reorders
from ridgeline.weights.stored import StoredTensor
from ridgeline.weights.transfer import fill

Progress = Callable[[str, float], None]

DUMMY_STD = 0.02
STORED_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of ranks: odd, so that no two are equal

logger = logging.getLogger(__name__)

_OTHER_NAMES = {
    **{"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},  # of BERT's first checkpoints
    "model.": "model.language_model.",  # of text models inside larger ones, as newer versions of transformers save them
    "vision_tower.": "vision_tower.vision_model.",  # of CLIP and SigLIP, as older versions of transformers save them
    "language_model.model.": "language_model.model.model.",  # of Qwen2-Audio, as transformers 5 saves it
    ".mlp.": ".block_sparse_moe.",  # of plain feed-forwards in Kimi Linear, as transformers saves it
}
_HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", *ROPE_FACTORS)  # they follow from the config


def read_model_config(
    folder: Path,
    overrides: Mapping[str, object] | None = None,
    runner: str = "auto",
    convert: str = "auto",
    impl: str = "ridgeline",
) -> ModelConfig:
    """Return the config of config.json and generation_config.json, if there is one, or of a GGUF file. `overrides` win
    over config.json. impl: as `model_impl` in the settings. Raise ModelLoadError, and InvalidConfig for overrides of a
    GGUF file, or for a runner or a conversion that is not the model's."""
    if is_gguf(folder):
        if overrides:
            raise InvalidConfig("hf_overrides change config.json, and a GGUF file has none; leave them out.")
        if impl == "transformers":
            raise InvalidConfig("model_impl transformers reads folders with config.json, not GGUF files; leave it out.")
        model, config = gguf_model_config(folder), dict[str, Any]()
    else:
        config = merged(first_colbert(folder), folder_config(folder, required=True))
        config = merged(config, cross_encoder(folder))
        config = merged(config, overrides or {})
        generation = read_json(folder / "generation_config.json")
        if impl == "transformers" or (impl == "auto" and not known(config)):
            return foreign_config(config, generation)
        model = model_config(config, generation)
    return pooled(
        model, config, read_modules(folder), runner=runner, convert=convert, token_id=partial(token_id, folder)
    )


def described(folder: Path, settings: ModelSettings) -> ModelConfig:
    """Return a folder's config as a user's settings want the model. Raise ModelLoadError and InvalidConfig, as
    `read_model_config` does."""
    found = read_model_config(folder, settings.hf_overrides, settings.runner, settings.convert, settings.model_impl)
    if settings.mm_encoder_only:
        return towers_alone(found)
    return texts_alone(found) if settings.language_model_only else found


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return these values with those of `overrides` in their place. Objects are merged likewise."""
    found = dict(values)
    for name, value in overrides.items():
        before = found.get(name)
        found[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


def with_cache(folder: Path, model: ModelConfig, wanted: KVFormat, *, files: bool = True) -> ModelConfig:
    """Return the model with its keys and values cached as is wanted, or as its quantization config says where nothing
    is. Raise InvalidConfig and ModelLoadError for what cannot be.

    files: False goes by the config alone.
    """
    config = None if is_gguf(folder) else quantization_config(folder, folder_config(folder))
    if config is None or not files:
        return replace(model, spec=cached_as(model.spec, wanted, config, model.weights, None))
    with open_checkpoint(folder) as stored:
        weights = as_stored(model.weights, stored, folder, model.spec)
        return replace(model, spec=cached_as(model.spec, wanted, config, weights, stored))


def check_files(folder: Path, model: ModelConfig) -> None:
    """Raise ModelLoadError unless the headers of the files promise what the config does. This comes before anything of
    the config's sizes is allocated."""
    with open_checkpoint(folder) as held:
        if model.foreign is not None:
            _check_foreign_files(folder, model, held)
            return
        weights = as_stored(model.weights, held, folder, model.spec)
        stored = with_zeros(weights, held)
        method = folder_method(folder)
        present = stored.keys() if method is None else stored.keys() | module_weights(stored)
        if missing := [each.name for sources in weights.values() for each in sources if each.name not in present]:
            raise ModelLoadError(f"{folder} lacks tensors that {_config_of(folder)} asks for: {shortened(missing)}.")
        decoder = empty_decoder(model.spec)
        pieces = pieces_of(decoder, weights, method, stored)
        check_checkpoint(decoder, checkpoint_views(decoder, weights), stored, folder, pieces)
        check_kv_scales(decoder, weights, stored)


def stored_as(folder: Path, dtype: str) -> bool:
    """Return True if all tensors of a folder's files have this type of torch, such as "bfloat16", and no method of
    quantization."""
    if is_gguf(folder) or folder_method(folder) is not None:
        return False
    with open_checkpoint(folder) as held:
        return {each.dtype for each in held.values()} == {STORED_NAMES.get(dtype)}


def _check_foreign_files(folder: Path, model: ModelConfig, stored: Stored) -> None:
    """Raise ModelLoadError if the files cannot hold what a class of transformers wants, which says itself, when it is
    filled, what is missing."""
    held, wanted = sum(prod(each.shape) for each in stored.values()), parameters(model.spec).total
    if held < wanted * 0.9:
        raise ModelLoadError(
            f"{folder} holds {held:,} numbers, and config.json asks {model.spec.architecture} for {wanted:,}; "
            "download it again."
        )
    if odd := [f"{name} is {each.dtype}" for name, each in stored.items() if each.dtype not in PLAIN]:
        raise ModelLoadError(f"{folder} holds tensors that are no plain numbers: {shortened(odd)}.")


@contextmanager
def open_plain(folder: Path, model: ModelConfig) -> Iterator[tuple[WeightMap, Stored]]:
    """Yield the weight map and the tensors of a model's files, in which quantized weights are plain numbers. Raise
    ModelLoadError as `check_files` does."""
    check_files(folder, model)
    with open_checkpoint(folder) as held:
        weights, decoder = as_stored(model.weights, held, folder, model.spec), empty_decoder(model.spec)
        stored = with_zeros(weights, held)
        pieces = pieces_of(decoder, weights, folder_method(folder), stored)
        shapes = {name: view.shape for name, view in checkpoint_views(decoder, weights).items()}
        yield weights, widened(weights, shapes, pieces, stored)


def stored_forms(folder: Path, model: ModelConfig, *, files: bool = True) -> Forms:
    """Return the forms that the weights of a quantized checkpoint can be kept in, by the names of the decoder's
    modules. Other modules' weights are plain numbers.

    files: False goes by the config alone, if there is one.
    """
    if not files and not is_gguf(folder):
        return config_forms(model, folder_config(folder), folder)
    if (method := folder_method(folder)) is None:
        return {}
    decoder = empty_decoder(model.spec)
    with open_checkpoint(folder) as stored:
        weights = as_stored(model.weights, stored, folder, model.spec)
        return forms(decoder, weights, pieces_of(decoder, weights, method, stored))


def config_forms(model: ModelConfig, config: Mapping[str, Any], folder: Path) -> Forms:
    """Return the forms of a quantized checkpoint's weights by its config.json alone."""
    if (method := method_of(quantization_config(folder, config))) is None:
        return {}
    decoder = empty_decoder(model.spec)
    return forms(decoder, model.weights, pieces_of(decoder, model.weights, method, None))


def empty_decoder(spec: ModelSpec) -> Decoder:
    """Return a decoder on a device that allocates nothing, for its names and shapes."""
    ops, meta = Ops(Platform(device_type="cpu")), torch.device("meta")
    return Decoder(spec, ops, dtype=torch.float32, device=meta, max_positions=1)


def load_weights(
    decoder: Decoder,
    folder: Path,
    weight_map: WeightMap,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Fill every parameter of `decoder` from `folder`, or with random numbers if load_format is "dummy". Quantized
    weights keep the form of the files in modules whose scheme says so; elsewhere they become plain numbers.

    Where several ranks divide the model, each fills its part, and reads no more of plain tensors than that. A stage of
    a pipeline reads its own layers.

    `progress` is called with what is being done and the fraction that is done. rounding: which weights of plain files
    are rounded while they are read. Raise ModelLoadError, before any parameter is touched, if files are missing or
    damaged, or hold other tensors than the config promises; afterwards if FP8 numbers that are kept are NaN.
    """
    if isinstance(decoder, ForeignDecoder):
        fill_foreign(decoder, folder, load_format=load_format, seed=seed, progress=progress)
        return
    if load_format == "dummy":
        fill_dummy(decoder, seed)
        return
    with open_checkpoint(folder) as held:
        weights = as_stored(weight_map, held, folder, decoder.whole)
        stored = with_zeros(weights, held)
        method, divides = folder_method(folder), decoder.mesh.of_experts.size > 1
        whole = not divides and decoder.spec.stage is None
        plain = decoder if whole and not method and rounding is None else empty_decoder(decoder.whole)
        pieces = pieces_of(plain, weights, method, stored) if rounding is None else rounding(plain, weights)
        views = checkpoint_views(plain, weights)
        check_checkpoint(plain, views, stored, folder, pieces)
        check_tied(decoder.whole, weights, stored, folder)
        check_kv_scales(plain, weights, stored)
        if not any(kv_scale_places(plain, weights, stored)):
            _tell_of_unused(stored)
        shapes = {name: view.shape for name, view in views.items()}
        numbers = widened(weights, shapes, pieces, stored)
        weights = weights_of_stage(weights, decoder.spec)
        if not divides:
            targets = [(place.tensor, place.read) for place in _places(decoder, weights, pieces, stored, numbers)]
        else:
            targets = _divided_targets(decoder, weights, pieces, stored, method, numbers)
        done, total = 0, sum(target.numel() for target, _ in targets)
        for count in _fill(targets):
            done += count
            if progress is not None:
                progress("loading weights", done / total)
        check_numbers(decoder, folder)
        for parameter, sources in weights.items():
            if offset := missing_offset(decoder, parameter, sources[0]):
                with torch.no_grad():
                    decoder.get_parameter(parameter).add_(offset)


def fill_foreign(
    decoder: ForeignDecoder, folder: Path, *, load_format: str, seed: int, progress: Progress | None
) -> None:
    """Fill a network of transformers' modules. Raise ModelLoadError if the files hold other tensors than it wants."""
    if load_format == "dummy":
        decoder.fill(None, seed)
        return
    with open_checkpoint(folder) as stored:
        tensors, total = {}, len(stored)
        for name, each in stored.items():
            if not name.endswith(_HARMLESS):
                tensors[name] = each.read()
            if progress is not None:
                progress("loading weights", (len(tensors) + 1) / (total + 1))
        decoder.fill(tensors)


def _divided_targets(
    decoder: Decoder, weights: WeightMap, pieces: Pieces, stored: Stored, method: Method | None, numbers: Stored
) -> list[tuple[Tensor, Callable[[], Tensor]]]:
    """Return the tensors of one rank of several, each with the function that reads its slice of the files. numbers: the
    files' tensors in which quantized weights are plain numbers."""
    whole, tp = whole_decoder(decoder), decoder.tp
    check_divided(decoder, whole)
    if decoder.mesh.whole_experts:
        weights, stored = of_own_experts(weights, stored, decoder, partial(_names_of, pieces))
        plain = empty_decoder(whole.whole)
        pieces = pieces_of(plain, weights, method, stored)
        shapes = {name: view.shape for name, view in checkpoint_views(plain, weights).items()}
        numbers = widened(weights, shapes, pieces, stored)
    own = _places(decoder, own_sources(weights, decoder, whole), pieces, stored, numbers)
    return list(divided(own, _places(whole, weights, pieces, stored, numbers), tp.rank, tp.size))


def _names_of(pieces: Pieces, name: str) -> Iterable[str]:
    """Return the tensors in which the files hold a source."""
    return pieces[name].tensors if name in pieces else (name,)


def with_zeros(weights: WeightMap, stored: Stored) -> Stored:
    """Return the files' tensors with zeros for those that a family leaves out."""
    absent = {each.name: each.zeros for sources in weights.values() for each in sources if each.zeros}
    found = {
        name: StoredTensor([count], "F32", partial(torch.zeros, count))
        for name, count in absent.items()
        if name not in stored
    }
    return {**stored, **found} if found else stored


def _tell_of_unused(stored: Stored) -> None:
    if scales := [name for name in stored if KV_SCALES.search(name)]:
        logger.warning(
            "%d scales of a quantized KV cache (%s, …) are not used; kv_cache_dtype says how it is kept.",
            len(scales),
            scales[0],
        )


def _places(decoder: Decoder, weights: WeightMap, pieces: Pieces, stored: Stored, plain: Stored) -> Iterator[Place]:
    """Yield each place to fill, with the function that reads it. plain: the files' tensors without quantized ones."""
    kept = {name for name, owner, _ in matrices(decoder, weights, tied=True) if owner.fillings}
    for name, module, sources in matrices(decoder, weights, tied=True):
        if name in kept:
            yield from targets(module, sources, pieces, stored, stored_view)
    for parameter, sources in weights.items():
        if parameter.removesuffix(".weight") in kept:
            continue
        owner, views = (
            decoder.get_submodule(parameter.rpartition(".")[0]),
            checkpoint_views(decoder, {parameter: sources}),
        )
        for source in sources:
            parts, view = fused_parts(owner, sources, source), views[source.name].tensor
            yield from _plain_places(plain[source.name], view, source, parts, quantized=source.name in pieces)
    yield from kv_scale_places(decoder, weights, stored)


def _plain_places(
    stored: StoredTensor, view: Tensor, source: Source, parts: Sequence[int] | None, *, quantized: bool
) -> Iterator[Place]:
    """Yield a parameter's part. Stacks of quantized experts are read one by one, since all of them would take much
    memory before they are copied."""
    if not quantized or stored.part is None:
        sliced = stored.sliced if list(view.shape) == stored.shape and not reorders(source) else None
        yield Place(view, lambda: in_our_order(stored.read().view(view.shape), source), sliced, parts)
        return
    for index, one in enumerate(view):
        yield Place(one, partial(_part, stored.part, index, one.shape), parts=parts)


def _part(part: Callable[[int], Tensor], index: int, shape: torch.Size) -> Tensor:
    return part(index).view(shape)


def missing_offset(network: nn.Module, parameter: str, source: Source) -> float:
    """Return the offset that a norm's weight lacks in this checkpoint, or 0 for any other tensor."""
    owner = network.get_submodule(parameter.rpartition(".")[0])
    return owner.offset if isinstance(owner, Norm) and not source.complete else 0.0


def _fill(targets: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> Iterator[int]:
    """Read every tensor into its target, and yield its number of elements."""
    on_gpu = [each for each in targets if each[0].is_cuda]
    if on_gpu:
        yield from fill(on_gpu, on_gpu[0][0].device)
    for target, read in targets if not on_gpu else [each for each in targets if not each[0].is_cuda]:
        with torch.no_grad():
            target.copy_(read())
        yield target.numel()


def fill_dummy(decoder: Decoder, seed: int) -> None:
    """Set the weights of norms, the factors of experts and layers and the scales of caches to 1, biases and corrections
    to 0, and the rest to normal(0, DUMMY_STD). Equal seeds on equal devices give equal numbers; of what ranks divide
    between them each has others."""
    generators: dict[tuple[torch.device, bool], torch.Generator] = {}
    seed += decoder.mesh.pp.rank  # so that stages do not repeat each other
    parts, seed_of_part = _divided_modules(decoder), (seed + SEED_STEP * (1 + decoder.mesh.of_experts.rank)) % (1 << 63)

    def generator_of(module: str, device: torch.device) -> torch.Generator:
        own = module in parts
        if (device, own) not in generators:
            generators[device, own] = torch.Generator(device).manual_seed(seed_of_part if own else seed)
        return generators[device, own]

    fill_randomly(decoder, generator_of)


def fill_randomly(network: nn.Module, generator_of: Callable[[str, torch.device], torch.Generator]) -> None:
    """Set a network's weights as `fill_dummy` does. generator_of: gives that of a module's numbers on a device."""
    for name, module in network.named_modules():
        for filling in module.fillings if isinstance(module, (Linear, ExpertStack)) else ():
            fill_random(filling, DUMMY_STD, generator_of(name, next(iter(filling.tensors.values())).device))
    here = next((parameter.device for parameter in network.parameters()), None)
    for name, parameter in network.named_parameters():
        if name.endswith(("bias", ".correction")):
            nn.init.zeros_(parameter)
        elif name.endswith(("norm.weight", ".expert_scale", ".scalar", ".kv_scales")):
            nn.init.ones_(parameter)
        elif here is not None and parameter.device != here and parameter.dim() == 2:  # a layer in the host's memory
            drawn, generator = torch.empty_like(parameter, device=here), generator_of(name.rpartition(".")[0], here)
            parameter.data.copy_(nn.init.normal_(drawn, std=DUMMY_STD, generator=generator))
        else:
            generator = generator_of(name.rpartition(".")[0], parameter.device)
            nn.init.normal_(parameter, std=DUMMY_STD, generator=generator)


def _divided_modules(decoder: Decoder) -> set[str]:
    """Return the modules of which a rank holds a part."""
    if decoder.mesh.of_experts.size == 1:
        return set()
    mesh, spec = decoder.mesh, decoder.whole
    whole, part = (empty_decoder(each) for each in (mesh.stage_of(spec), mesh.part_of(spec)))
    own = dict(part.named_parameters())
    return {name.rpartition(".")[0] for name, each in whole.named_parameters() if each.shape != own[name].shape}


def export_checkpoint(decoder: Decoder, weight_map: WeightMap) -> dict[str, Tensor]:
    """Return contiguous copies under the checkpoint's names and shapes, on the decoder's device: the inverse of
    loading."""
    views = checkpoint_views(decoder, weight_map)
    stored = {
        source.name: in_their_order(
            views[source.name].tensor.detach().clone(memory_format=torch.contiguous_format), source
        ).view(views[source.name].shape)
        for sources in weight_map.values()
        for source in sources
    }
    for parameter, sources in weight_map.items():
        if offset := missing_offset(decoder, parameter, sources[0]):
            stored[sources[0].name] -= offset
    return stored


class StoredView(NamedTuple):
    """The part of a parameter that a checkpoint's tensor fills, as `stored_view`, and the shape of that tensor. Rows
    that are stored head by head are in our order here (`weights.rows`)."""

    tensor: Tensor
    shape: list[int]


def checkpoint_views(network: nn.Module, weight_map: WeightMap) -> dict[str, StoredView]:
    """Return the part of a parameter that each checkpoint tensor fills, by the tensor's name."""
    views: dict[str, StoredView] = {}
    for parameter_name, sources in weight_map.items():
        parameter: Tensor = network.get_parameter(parameter_name)
        owner = network.get_submodule(parameter_name.rpartition(".")[0])
        for source, part in zip(sources, _parts(parameter, owner, sources), strict=True):
            views[source.name] = StoredView(stored_view(part, source), stored_shape(part, source))
    return views


def _parts(parameter: Tensor, owner: nn.Module, sources: Sequence[Source]) -> Sequence[Tensor]:
    """Return the part of a parameter that each of its sources fills."""
    if isinstance(owner, ExpertStack) and not sources[0].stacked:
        # in one call, as there may be hundreds
        return parameter.flatten(0, 1).split(owner.parts * len(parameter))
    if len(sources) == 1:
        return [parameter]
    return parameter.split(getattr(owner, "parts", ()), dim=1 if sources[0].stacked else 0)


def stored_view(part: Tensor, source: Source) -> Tensor:
    """Return our part of a parameter in the order of the checkpoint's tensor, unless that is stored head by head
    (`weights.rows`). Where that is another order of pairs, they have dimensions of their own."""
    if source.interleaved is not None and source.rotated is None:  # [head by half, …] seen as [head, pair, half, …]
        return part.unflatten(0, (source.interleaved, 2, -1)).transpose(1, 2)
    if source.alternating:  # [stack, gate | up, …] seen as [stack, …, pair, gate | up]
        part = part.unflatten(1, (2, -1)).transpose(1, 2)
        return part.movedim(-1, 1) if source.transpose else part
    return part.mT if source.transpose and part.ndim > 1 else part


def stored_shape(part: Tensor, source: Source) -> list[int]:
    """Return the shape of the checkpoint's tensor."""
    if source.scalar:
        return []
    if source.columns:
        return [1] * source.row + [len(part) // source.columns, source.columns, *part.shape[1:]]
    if source.row:
        return [1] * source.row + list(part.shape) + [1] * len(source.kernel)
    if source.kernel:
        return [len(part), part.shape[1] // prod(source.kernel), *source.kernel]
    return list((part.mT if source.transpose and part.ndim > 1 else part).shape)


def as_stored(weight_map: WeightMap, stored: Mapping[str, StoredTensor], folder: Path, spec: ModelSpec) -> WeightMap:
    """Return the map with a GGUF file's names and orders, or without the base model's prefix ("model.", "transformer.")
    if the checkpoint was saved without it, and with experts together if the checkpoint holds them so."""
    if is_gguf(folder):
        return gguf_weights(read_gguf(folder), weight_map, spec)
    weight_map = {name: together(sources, stored) for name, sources in weight_map.items()}
    first = weight_map.get("embed.weight") or next(iter(weight_map.values()))  # a tower alone has no table
    prefix = first[0].name.partition(".")[0] + "."
    bare = not any(name.startswith(prefix) for name in stored)

    def named(source: Source) -> Source:
        name = source.name.removeprefix(prefix) if bare else source.name
        for ours, theirs in _OTHER_NAMES.items():
            if name not in stored and (other := name.replace(ours, theirs)) in stored:
                name = other
        return replace(source, name=name)

    return {
        parameter: tuple(facing(parameter, named(source), stored, spec) for source in sources)
        for parameter, sources in weight_map.items()
    }


def facing(parameter: str, source: Source, stored: Mapping[str, StoredTensor], spec: ModelSpec) -> Source:
    """Return the source of a stack of experts as the checkpoint has it: some that are mostly stored with their inputs
    first are stored with their outputs first, as newer versions of transformers save them."""
    if not (source.stacked and source.transpose) or source.name not in stored:
        return source
    outputs, inputs = ([*stored[source.name].shape, 0, 0, 0])[1:3]
    first, second = (inputs, outputs) if parameter.endswith("gate_up.weight") else (outputs, inputs)
    return replace(source, transpose=False) if first == spec.hidden_size != second else source


def together(sources: tuple[Source, ...], stored: Mapping[str, StoredTensor]) -> tuple[Source, ...]:
    """Return the one tensor that holds all of a layer's experts, gates above ups, if the checkpoint has it instead of
    the experts' own."""
    layer, found, part = sources[0].name.partition(".experts.0.")
    if not found or sources[0].name in stored:
        return sources
    name = f"{layer}.experts.{'gate_up_proj' if part.startswith('gate_proj.') else part.partition('.')[0]}"
    return (Source(name=name, stacked=True),) if name in stored else sources


def check_checkpoint(
    decoder: Decoder, views: Mapping[str, StoredView], stored: Stored, folder: Path, pieces: Pieces
) -> None:
    """Raise ModelLoadError unless the files hold exactly what the config promises."""
    says = _config_of(folder)
    for piece in pieces.values():
        if problem := piece.problem(stored):
            raise ModelLoadError(f"{folder} {problem}.")
    used = {name for piece in pieces.values() for name in piece.tensors}
    views = {name: view for name, view in views.items() if name not in pieces}
    if missing := [name for name in views if name not in stored]:
        raise ModelLoadError(f"{folder} lacks tensors that {says} asks for: {shortened(missing)}.")
    spare = (name for name in stored if name not in views and name not in used)
    if extra := [name for name in spare if not redundant(name, decoder, stored, pieces)]:
        raise ModelLoadError(f"{folder} holds tensors that {says} has no place for: {shortened(extra)}.")
    misshaped = [
        f"{name} is {stored[name].shape}, wanted {view.shape}"
        for name, view in views.items()
        if stored[name].shape != view.shape
    ]
    if misshaped:
        raise ModelLoadError(f"{folder} holds tensors of other shapes than {says} says: {shortened(misshaped)}.")
    if odd := [f"{name} is {stored[name].dtype}" for name in views if stored[name].dtype not in LOADABLE]:
        raise ModelLoadError(f"{folder} holds tensors of types we do not load: {shortened(odd)}.")


def check_tied(model: ModelSpec, weights: WeightMap, stored: Stored, folder: Path) -> None:
    """Raise ModelLoadError if the tied output layer is stored with other numbers than the embedding, because it is not
    clear which are meant."""
    if not (model.tie_word_embeddings and model.scores):
        return
    copy, embed = stored.get("lm_head.weight"), stored.get(weights["embed.weight"][0].name)
    if copy is None or embed is None:
        return
    if not {copy.dtype, embed.dtype} <= PLAIN:
        return
    ours = copy.read()
    if not torch.equal(ours, embed.read().to(ours.dtype)):
        raise ModelLoadError(
            f"{folder} ties lm_head.weight to the embedding, but stores another one; "
            "set tie_word_embeddings to false if it is the right one, else delete it."
        )


def _config_of(model: Path) -> str:
    return "its metadata" if is_gguf(model) else "config.json"


def redundant(name: str, decoder: Decoder, stored: Stored, pieces: Pieces) -> bool:
    """Return True for a buffer that follows from the config, a tensor of the tied embedding's shape (see `check_tied`),
    what the architecture does not use, scales of a quantized cache, or a bias of zeros, such as BART's of scores or one
    that a quantizer added."""
    if KV_SCALES.search(name):
        return True
    if name == "final_logits_bias":
        return not stored[name].read().any()
    if f"{name.removesuffix('.bias')}.weight" in pieces and name.endswith(".bias"):
        return not stored[name].read().any()
    tied = name == "lm_head.weight" and decoder.spec.tie_word_embeddings
    copy = tied and stored[name].shape == list(decoder.embed.weight.shape)
    return copy or name.endswith(_HARMLESS) or name.startswith(decoder.spec.unused)


def shortened(names: list[str], shown: int = 4) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
