"""The quantization config of a folder, in config.json or in a file beside it, and the method that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.mistral_files import folder_config
from ridgeline.weights.quantized import METHODS
from ridgeline.weights.quantized.gguf import Gguf
from ridgeline.weights.quantized.piece import Method

ENTRIES = ("quantization_config", "compression_config")
SIDE_FILES = {  # their methods: configs had no entry for it once
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def quantization_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization config in a folder's config.json, or in the file beside it; None: there is none."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for name in ENTRIES:
            if (found := values.get(name)) is not None:
                if not isinstance(found, Mapping):
                    raise ModelLoadError(f"config.json sets {name} to {repr(found)[:80]}; it must be an object.")
                return _flat(found) or None
    for name, method in SIDE_FILES.items():
        if side := read_json(folder / name):
            return {"quant_method": method, **_flat(side)}
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without what it says of quantized weights."""
    left = {name: value for name, value in config.items() if name not in ENTRIES}
    text = left.get("text_config")
    return {**left, "text_config": without_quantization(text)} if isinstance(text, Mapping) else left


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config without the level that some of modelopt's have."""
    inner = config.get("quantization")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def method_of(config: Mapping[str, Any] | None) -> Method | None:
    """Return the method of a quantization config. Raise ModelLoadError for one that we do not read."""
    if config is None:
        return None
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise ModelLoadError(
            f"config.json names the quantization method {repr(name)[:80]}, which is not read; known are "
            f"{', '.join(METHODS)}."
        )
    method: Method = METHODS[name](config)
    return method


def method_name(folder: Path) -> str | None:
    """Return the name of the method of the weights in a folder, or None if they are plain numbers."""
    config = quantization_config(folder, folder_config(folder))
    return None if config is None else str(config.get("quant_method"))


def folder_method(folder: Path) -> Method | None:
    """Return the method of the weights in a folder or GGUF file."""
    if is_gguf(folder):
        return Gguf()
    return method_of(quantization_config(folder, folder_config(folder)))
