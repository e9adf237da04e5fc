"""Adapters as llama.cpp's converter writes them: one GGUF file, whose tensors have the names of the model's GGUF files
and an end, ".lora_a" or ".lora_b". Their rows have the orders of such files.

Legend:
    I  inputs of a module
    O  outputs of a module
    R  the adapter's rank there
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.adapters.content import MOST_HEADER, read_content
from ridgeline.weights.adapters.places import ModulePlace, places_in
from ridgeline.weights.adapters.reader import LONGEST, WIDEST, ReadAdapter, listed_modules
from ridgeline.weights.adapters.stacks import ThinPair
from ridgeline.weights.formats.gguf_file import GGUF, read_gguf
from ridgeline.weights.gguf.names import gguf_weights

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES = ".lora_a", ".lora_b"


def read_gguf_adapter(
    path: Path,
    whole: Decoder,
    weights: WeightMap,
    places: Mapping[str, ModulePlace],
    *,
    most_rank: int,
    dtype: torch.dtype,
) -> ReadAdapter:
    """Return the adapter in a file, in a dtype. whole, weights: the model's. places: of its modules by
    the names of its own checkpoint. Raise ModelLoadError, in one sentence, for a file that cannot be followed."""
    most_bytes = MOST_HEADER + most_rank * WIDEST * sum(each.map.inputs + each.outputs for each in places.values())
    content = read_content(path, most_bytes).octets.numpy().tobytes()
    with TemporaryDirectory() as folder:  # the header's reader wants a file, and this one nobody else writes
        copy = Path(folder) / "adapter.gguf"
        copy.write_bytes(content)
        gguf = read_gguf(copy)
    alpha = _alpha(path, gguf)
    linear = {name: sources for name, sources in weights.items() if _of_layers(name, places)}
    theirs = places_in(whole, _named(path, gguf, linear, whole.spec))
    ours = {(place.map.name, place.part): place for place in places.values()}
    pairs = list[ThinPair]()
    for module in _modules(path, gguf, theirs):
        place = theirs[module]
        down_RI, up_OR = (_tensor(path, gguf, f"{module}.weight{half}", content) for half in _HALVES)
        rank = len(down_RI)
        if rank > most_rank or down_RI.shape[1:] != (place.map.inputs,) or up_OR.shape != (place.outputs, rank):
            raise ModelLoadError(
                f"{path} holds matrices of {module[:LONGEST]} of shapes {list(down_RI.shape)} and {list(up_OR.shape)}, "
                f"and this model wants [rank, {place.map.inputs}] and [{place.outputs}, rank] with rank up to "
                f"max_lora_rank {most_rank}; give an adapter of this model, or raise that."
            )
        up_OR = place.in_our_order(up_OR.float()) * (alpha / rank if alpha else 1.0)
        own = ours.get((place.map.name, place.part), place)
        pair = ThinPair(own, down_RI.to(dtype).contiguous(), up_OR.to(dtype).contiguous())
        if not (pair.down_RI.isfinite().all() and pair.up_OR.isfinite().all()):
            raise ModelLoadError(f"{path} holds numbers of {module[:LONGEST]} that are not finite; convert it again.")
        pairs.append(pair)
    return ReadAdapter(f"adapter {blake2b(content, digest_size=16).hexdigest()}", tuple(pairs))


def _of_layers(name: str, places: Mapping[str, ModulePlace]) -> bool:
    return name.endswith(".weight") and any(place.map.name == name.removesuffix(".weight") for place in places.values())


def _alpha(path: Path, gguf: GGUF) -> float:
    """Return the adapter's alpha; 0: its scale is 1."""
    kind, form = gguf.values.get("general.type"), gguf.values.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelLoadError(
            f"{path} has general.type {str(kind)[:40]!r} and adapter.type {str(form)[:40]!r}, and an adapter has "
            "'adapter' and 'lora'; convert one by llama.cpp's convert_lora_to_gguf.py."
        )
    alpha = gguf.values.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, (int, float)) or not isfinite(alpha) or abs(alpha) > 1e6:
        raise ModelLoadError(
            f"{path} has adapter.lora.alpha {str(alpha)[:40]}, which must be a number up to a million."
        )
    return float(alpha)


def _named(path: Path, gguf: GGUF, weights: WeightMap, spec: ModelSpec) -> WeightMap:
    """Return the model's map with the names of the file's architecture."""
    try:
        return gguf_weights(gguf, weights, spec)
    except (KeyError, AssertionError) as error:
        raise ModelLoadError(
            f"{path} is of the architecture {str(gguf.values.get('general.architecture'))[:40]!r}, and the model is "
            "another one; give an adapter of this model."
        ) from error


def _modules(path: Path, gguf: GGUF, places: Mapping[str, ModulePlace]) -> list[str]:
    """Return the modules of which the file has both matrices, and nothing else."""
    ends = tuple(f".weight{half}" for half in _HALVES)
    modules = {next((name.removesuffix(end) for end in ends if name.endswith(end)), name) for name in gguf.tensors}
    if foreign := sorted(modules - places.keys()):
        raise ModelLoadError(
            f"{path} adapts modules that this model lacks, or that adapters cannot change here: "
            f"{listed_modules(foreign)}; give an adapter of this model's linear layers."
        )
    if lone := [each for each in sorted(modules) if any(f"{each}{end}" not in gguf.tensors for end in ends)]:
        raise ModelLoadError(f"{path} holds one of two matrices of {listed_modules(lone)}; convert it again.")
    if not modules:
        raise ModelLoadError(f"{path} holds no tensors; convert it again.")
    return sorted(modules)


def _tensor(path: Path, gguf: GGUF, name: str, content: bytes) -> Tensor:
    info = gguf.tensors[name]
    if (dtype := _DTYPES.get(info.type.name)) is None or len(info.shape) != 2:
        raise ModelLoadError(
            f"{path} holds {name[:LONGEST]} as {info.type.name} of shape {list(info.shape)}; convert it with --outtype "
            "f32, f16 or bf16."
        )
    if info.start + info.num_bytes > len(content):
        raise ModelLoadError(f"{path} is damaged: {name[:LONGEST]} lies behind its end; copy it again.")
    numbers = bytearray(content[info.start : info.start + info.num_bytes])
    return torch.frombuffer(numbers, dtype=dtype).view(info.shape) if numbers else torch.empty(info.shape)
