"""From a model folder to parameters. Only json and safetensors are ever read: nothing here can run code.

Checkpoint tensors are mapped into memory and copied, cast, straight into their part of the (fused) parameter, on
whatever device that is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.model_spec import WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.norm import Norm
from ridgeline.models import model_config
from ridgeline.models.config import ModelConfig
from ridgeline.worker.folder import resolve_model as resolve_model
from ridgeline.worker.transfer import fill

Progress = Callable[[str, float], None]

DUMMY_STD = 0.02

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = {"F64", "F32", "BF16", "F16"}
_HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def read_model_config(folder: Path) -> ModelConfig:
    """What config.json and, where there is one, generation_config.json say. Raises ModelLoadError."""
    generation = folder / "generation_config.json"
    return model_config(_read_json(folder / "config.json"), _read_json(generation) if generation.exists() else None)


def load_weights(
    decoder: Decoder,
    folder: Path,
    weight_map: WeightMap,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter of `decoder` from `folder`, or with random numbers where load_format is "dummy".

    progress: called with what is being done and the fraction that is. Raises ModelLoadError, before any parameter is
    touched, if files are missing or damaged, or hold other tensors than the config promises.
    """
    if load_format == "dummy":
        fill_dummy(decoder, seed)
        return
    with ExitStack() as stack:
        stored = _by_name({path: _opened(path, stack) for path in _weight_files(folder)})
        views = checkpoint_views(decoder, _as_stored(weight_map, stored))
        _check(decoder, views, stored, folder)
        done, total = 0, sum(view.numel() for view in views.values())
        for count in _fill({name: (view, partial(_read, stored[name], name, view)) for name, view in views.items()}):
            done += count
            if progress is not None:
                progress("loading weights", done / total)
        _add_offsets(decoder)


def _read(file: Any, name: str, view: Tensor) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    return tensor.view(view.shape)


def _add_offsets(decoder: Decoder) -> None:
    """To norm weights that the checkpoint stores without a part of them."""
    with torch.no_grad():
        for module in decoder.modules():
            if isinstance(module, Norm) and module.offset:
                module.weight.add_(module.offset)


def _by_name(files: Mapping[Path, Any]) -> dict[str, Any]:
    """Tensor name → the open file that holds it. Raises ModelLoadError where two do: which one is meant?"""
    holders: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            if name in holders:
                raise ModelLoadError(
                    f"{name} is in both {holders[name]} and {path.name}; delete the shard that is wrong."
                )
            holders[name] = path
    return {name: files[path] for name, path in holders.items()}


def _fill(targets: Mapping[str, tuple[Tensor, Callable[[], Tensor]]]) -> Iterator[int]:
    """Read every tensor into its target; yields its elements."""
    device = next((target.device for target, _ in targets.values()), torch.device("cpu"))
    if device.type == "cuda":
        yield from fill(targets.values(), device)
        return
    for target, read in targets.values():
        with torch.no_grad():
            target.copy_(read())
        yield target.numel()


def fill_dummy(decoder: Decoder, seed: int) -> None:
    """Norm weights 1, biases 0, the rest normal(0, DUMMY_STD); equal seeds on equal devices give equal numbers."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in decoder.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
        else:
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            torch.nn.init.normal_(parameter, std=DUMMY_STD, generator=generator)


def export_checkpoint(decoder: Decoder, weight_map: WeightMap) -> dict[str, Tensor]:
    """The inverse of loading: contiguous copies under the checkpoint's names and shapes, on the decoder's device."""
    stored = {
        name: view.detach().clone(memory_format=torch.contiguous_format).view(stored_shape(view))
        for name, view in checkpoint_views(decoder, weight_map).items()
    }
    for parameter, sources in weight_map.items():
        owner = decoder.get_submodule(parameter.rpartition(".")[0])
        if isinstance(owner, Norm) and owner.offset:
            stored[sources[0].name] -= owner.offset
    return stored


def checkpoint_views(decoder: Decoder, weight_map: WeightMap) -> dict[str, Tensor]:
    """Checkpoint tensor name → the part of a parameter it fills, as a view with the checkpoint tensor's shape (one
    that is stored by heads: [heads, 3, rows of each, …])."""
    views: dict[str, Tensor] = {}
    for parameter_name, sources in weight_map.items():
        parameter = decoder.get_parameter(parameter_name)
        owner = decoder.get_submodule(parameter_name.rpartition(".")[0])
        rows = getattr(owner, "parts", ()) if len(sources) > 1 else (len(parameter),)
        for source, part in zip(sources, parameter.split(rows), strict=True):
            if source.heads is not None:  # [q | k | v by head, …] seen as [head, q | k | v, …]
                part = part.unflatten(0, (3, source.heads, -1)).transpose(0, 1)
            views[source.name] = part.t() if source.transpose else part
    return views


def stored_shape(view: Tensor) -> list[int]:
    """Of the checkpoint's tensor: heads, parts and rows of a view by heads are its first dimension."""
    return list(view.shape) if view.ndim <= 2 else [view.shape[:3].numel(), *view.shape[3:]]


def _as_stored(weight_map: WeightMap, stored: Mapping[str, Any]) -> WeightMap:
    """Without the base model's prefix ("model.", "transformer.") if the checkpoint was saved without it."""
    prefix = weight_map["embed.weight"][0].name.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in stored):
        return weight_map
    return {
        parameter: tuple(replace(source, name=source.name.removeprefix(prefix)) for source in sources)
        for parameter, sources in weight_map.items()
    }


def _check(decoder: Decoder, views: Mapping[str, Tensor], stored: Mapping[str, Any], folder: Path) -> None:
    if missing := [name for name in views if name not in stored]:
        raise ModelLoadError(f"{folder} lacks tensors that config.json asks for: {_some(missing)}.")
    if extra := [name for name in stored if name not in views and not _redundant(name, decoder, stored)]:
        raise ModelLoadError(f"{folder} holds tensors that config.json has no place for: {_some(extra)}.")
    misshaped = [
        f"{name} is {_shape(stored, name)}, wanted {stored_shape(view)}"
        for name, view in views.items()
        if _shape(stored, name) != stored_shape(view)
    ]
    if misshaped:
        raise ModelLoadError(f"{folder} holds tensors of other shapes than config.json says: {_some(misshaped)}.")
    dtypes = {name: stored[name].get_slice(name).get_dtype() for name in views}
    if odd := [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in _FLOATS]:
        raise ModelLoadError(f"{folder} holds tensors of types we do not load: {_some(odd)}.")


def _redundant(name: str, decoder: Decoder, stored: Mapping[str, Any]) -> bool:
    """A buffer that follows from the config, or a copy of the tied embedding."""
    tied = name == "lm_head.weight" and decoder.spec.tie_word_embeddings
    return name.endswith(_HARMLESS) or (tied and _shape(stored, name) == list(decoder.embed.weight.shape))


def _shape(stored: Mapping[str, Any], name: str) -> list[int]:
    return stored[name].get_slice(name).get_shape()


def _weight_files(folder: Path) -> list[Path]:
    """The single file if there is one, else the shards the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelLoadError(f"{index} has no weight_map from tensor names to file names.")
        names = sorted(set(shards.values()))
        if wrong := [name for name in names if not _is_shard_name(name)]:
            raise ModelLoadError(f"{index} names {wrong[0][:80]!r}, which is no .safetensors file of that folder.")
        return [folder / name for name in names]
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder; give the one that holds config.json and model.safetensors.")
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} holds only pickled weights; they can run code when opened, so only safetensors are loaded: "
            "convert them first."
        )
    raise ModelLoadError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json.")


def _is_shard_name(name: str) -> bool:
    """Whether it can only be a file beside the index: an index must not point at files elsewhere."""
    return name.endswith(".safetensors") and name.isprintable() and "/" not in name and len(name) <= 255


def _opened(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing, though the index beside it names it.") from error
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or incomplete ({error}); download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist; a model folder needs it.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as json ({error}).") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a json object, not {type(content).__name__}.")
    return content


def _some(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
