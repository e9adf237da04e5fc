"""The tensors of a model as its files hold them: safetensors in a folder, or GGUF.

Files are mapped into memory, and a tensor is read when it is asked for. Nothing in the files can run code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.dequantize import dequantize
from ridgeline.weights.formats.gguf_file import TENSOR_TYPES, TensorInfo, is_gguf, read_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.mistral_files import WEIGHTS, tensor_name
from ridgeline.weights.gguf.restored import restored
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.modules import module_folders
from ridgeline.weights.stored import StoredTensor

PLAIN = frozenset({"F64", "F32", "BF16", "F16"})
LOADABLE = frozenset(PLAIN | {type.name for type in TENSOR_TYPES.values()})

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@contextmanager
def open_checkpoint(model: Path) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of a folder or GGUF file, by their names there. Raise ModelLoadError if files are missing or
    damaged."""
    if is_gguf(model):
        yield _gguf_tensors(model)
        return
    with ExitStack() as stack:
        files = weight_files(model)
        found = _by_name({path: _opened(path, stack) for path in files})
        if files[0].name.startswith(WEIGHTS.partition(".")[0]):
            found = {ours: each for name, each in found.items() if (ours := tensor_name(name)) is not None}
        for module in module_folders(model):
            own = _by_name({path: _opened(path, stack) for path in weight_files(model / module)})
            found |= {f"{module}/{name}": tensor for name, tensor in own.items()}
        yield found


def _gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    gguf = read_gguf(path)
    mapped = {file: _mapped(file) for file in {info.file for info in gguf.tensors.values()}}

    def stored(info: TensorInfo) -> StoredTensor:
        def aligned(start: int, size: int) -> Tensor:
            data = mapped[info.file][start : start + size]
            return data if start % 8 == 0 else data.clone()

        each = info.num_bytes // max(1, info.shape[0])
        return StoredTensor(
            list(info.shape),
            info.type.name,
            lambda: dequantize(aligned(info.start, info.num_bytes), info.type).view(info.shape),
            lambda index: dequantize(aligned(info.start + index * each, each), info.type).view(info.shape[1:]),
            lambda: aligned(info.start, info.num_bytes).view(-1, info.type.bytes),
        )

    return restored(Values(gguf), {name: stored(info) for name, info in gguf.tensors.items()})


def _mapped(file: Path) -> Tensor:
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


def _by_name(files: Mapping[Path, Any]) -> dict[str, StoredTensor]:
    """Return the files' tensors by name. Raise ModelLoadError if two files hold a tensor of one name."""
    holders: dict[str, Path] = {}
    found: dict[str, StoredTensor] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            if name in holders:
                raise ModelLoadError(
                    f"{name} is in both {holders[name]} and {path.name}; delete the shard that is wrong."
                )
            holders[name] = path
            part = file.get_slice(name)
            whole = partial(file.get_tensor, name)
            found[name] = StoredTensor(
                part.get_shape(), part.get_dtype(), whole, part.__getitem__, sliced=part.__getitem__
            )
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the single file if there is one, else the shards that the index names; those of Mistral's own form if
    there are no others."""
    for name in ("model.safetensors", WEIGHTS):
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}.index.json").exists():
            return _shards(folder, index)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder; give the one that holds config.json and model.safetensors.")
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} holds only pickled weights; they can run code when opened, so only safetensors are loaded: "
            "convert them first."
        )
    raise ModelLoadError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json.")


def _shards(folder: Path, index: Path) -> list[Path]:
    """Return the files that an index names. Raise ModelLoadError if they are not beside it."""
    shards = read_json(index, required=True).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelLoadError(f"{index} has no weight_map from tensor names to file names.")
    names = sorted(set(shards.values()))
    if wrong := [name for name in names if not _is_shard_name(name)]:
        raise ModelLoadError(f"{index} names {wrong[0][:80]!r}, which is no .safetensors file of that folder.")
    return [folder / name for name in names]


def _is_shard_name(name: str) -> bool:
    """Return True if the name can only be a file beside the index. An index must not point at files elsewhere."""
    return name.endswith(".safetensors") and name.isprintable() and "/" not in name and len(name) <= 255


def _opened(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing, though the index beside it names it.") from error
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or incomplete ({error}); download it again.") from error
