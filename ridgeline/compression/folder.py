"""Writing of a quantized model's folder, which appears when it is complete, and not at all after an error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeline.compression.quantize import QuantizedModel
from ridgeline.compression.writers import WRITERS, Written
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.convert.convert import copy_beside
from ridgeline.weights.convert.shards import DTYPES, Planned, split, write_shards
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.head_files import drafting_layer
from ridgeline.weights.loader import as_stored, export_checkpoint

Progress = Callable[[str, float], None]

SHARD_SIZE = 5 * 10**9
SPARE = 1 << 20  # bytes beside the tensors, for what is copied


def check_target(target: Path) -> None:
    """Raise InvalidConfig if the folder exists and is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidConfig(f"{target} exists already; name a folder that does not.")


def write(model: QuantizedModel, target: Path, *, shard_size: int = SHARD_SIZE, progress: Progress) -> int:
    """Write the folder, and return the bytes of its tensors. Raise InvalidConfig if it exists, if the format cannot
    hold a module, or if there is no room for it."""
    check_target(target)
    planned, written = plan(model)
    total = sum(tensor.num_bytes for tensor in planned)
    target.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(target.parent).free) < total + SPARE:
        raise InvalidConfig(f"{target} needs {total + SPARE:,} bytes, and its disk has {free:,} left; make room.")
    partial_folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial_folder.mkdir()
    done = 0

    def count(tensor: Planned) -> None:
        nonlocal done
        done += tensor.num_bytes
        progress("writing", done / total)

    try:
        write_shards(partial_folder, split(planned, shard_size), count)
        copy_beside(model.folder, partial_folder)
        _note_in_card(model, partial_folder / "README.md")
        (partial_folder / "config.json").write_text(json.dumps(_config(model, written), indent=2) + "\n", "utf-8")
        partial_folder.rename(target)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return total


def plan(model: QuantizedModel) -> tuple[list[Planned], Written]:
    """Return the tensors to be written, and the facts about them for the writer."""
    writer, drafting = WRITERS[model.make.file_format], _drafting(model)
    modules = [name.removesuffix(".weight") for name, tensor in drafting.items() if tensor.ndim > 1]
    written = Written(made=model.outcome.made, kept=[*model.kept, *modules], dtype=model.dtype, config=model.make)
    tensors: dict[str, Tensor] = dict(drafting)
    for name, made in model.outcome.made.items():
        tensors |= writer.tensors(name, made, model.dtype)
    tensors |= _plain(model)
    return [_planned(name, tensor) for name, tensor in tensors.items()], written


def _plain(model: QuantizedModel) -> dict[str, Tensor]:
    """Return the tensors that were not quantized, in the dtypes of the model's files."""
    decoder, weights = model.decoder, model.config.weights
    parameters = {name for name, _ in decoder.named_parameters(remove_duplicate=False)}
    left = {name: sources for name, sources in weights.items() if name in parameters}
    with open_checkpoint(model.folder) as stored:
        theirs = as_stored(weights, stored, model.folder, model.config.spec)
        pairs = [pair for name in left for pair in zip(left[name], theirs[name], strict=True)]
        kinds = {ours.name: DTYPES.get(stored[their.name].dtype, model.dtype) for ours, their in pairs}
    return {name: tensor.to("cpu", kinds[name]) for name, tensor in export_checkpoint(decoder, left).items()}


def _drafting(model: QuantizedModel) -> dict[str, Tensor]:
    """Return the tensors of the layer for multi-token prediction, which stay as they are, if the files hold one."""
    with open_checkpoint(model.folder) as stored:
        return {name: tensor.read() for name, tensor in drafting_layer(model.config.spec, stored).items()}


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tensor.shape, tensor.dtype, partial(_on_host, tensor))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous()


def _note_in_card(model: QuantizedModel, card: Path) -> None:
    """Say in the copied card that its figures are those of the model before."""
    if card.exists():
        schemes = ", ".join(sorted({made.scheme for made in model.outcome.made.values()}))
        with card.open("a", encoding="utf-8") as file:
            file.write(
                f"\n## Quantized\n\nRidgeline quantized these weights ({schemes}, method {model.make.method}, "
                f"{model.bits_per_weight:.2f} bits per weight). The figures above are those of the model before.\n"
            )


def _config(model: QuantizedModel, written: Written) -> dict[str, Any]:
    config = read_json(model.folder / "config.json", required=True)
    config.pop("torch_dtype", None)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = WRITERS[model.make.file_format].quantization_config(written)
    return config


def weight_bytes(model: QuantizedModel) -> int:
    """Return the bytes of all tensors as they will be written."""
    return sum(tensor.num_bytes for tensor in plan(model)[0])
