"""The scales that a checkpoint brings for its KV cache, where a cached number is a level times a scale.

Files have one scale for all keys of a layer and one for all values, or one for each head of either. A level is what the
file's maker took it for: x / scale, rounded to E4M3 (the format with 448 as its largest number, on every device) or to
int8.

Legend:
    G  key/value heads
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import AttentionSpec, ModelSpec, WeightMap
from ridgeline.kernels.base.kv_format import KVFormat
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.divided import Place
from ridgeline.weights.quantized.piece import FLOATS, Section, Stored, checked_scales

KV_SCALES = re.compile(
    r"\.(?:[kvq]|kv|prob|prob_output|(?:[kvq]|qkv)_proj\.output|(?:[kv]|qkv)_proj\.[kv])_(?:scale|zero_point)$"
)
SPELLINGS = ("{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "qkv_proj.{0}_scale")
ALGORITHMS = {"FP8": "fp8_e4m3", "INT8": "int8"}
TYPES = {"float": "fp8_e4m3", "int": "int8"}
STRATEGIES = ("tensor", "attn_head")

logger = logging.getLogger(__name__)


def cached_as(
    spec: ModelSpec, wanted: KVFormat, config: Mapping[str, Any] | None, weights: WeightMap, stored: Stored | None
) -> ModelSpec:
    """Return the model with the cache that is wanted, or that its checkpoint wants where "auto" is, with the
    checkpoint's scales where it brings them for this format. Raise ModelLoadError for a format that we have not.

    config: the quantization config. stored: the files' tensors; None: there are none to look at.
    """
    if config is None:
        return spec.with_kv_format(wanted)
    said = said_format(config) if wanted.dtype is None else None
    if said is None:
        if wanted.dtype == _made_for(config) and stored is not None and _any_scales(spec, weights, stored):
            wanted = replace(wanted, scales="model")
        return spec.with_kv_format(wanted)
    if said.scales == "model" and stored is not None and not _any_scales(spec, weights, stored):
        said = replace(said, scales="row")
    whose = "the checkpoint's scales" if said.scales == "model" else "scales of its own for each row"
    logger.info("the KV cache is in %s with %s, as config.json says; kv_cache_dtype sets another", said.dtype, whose)
    return spec.with_kv_format(said)


def said_format(config: Mapping[str, Any]) -> KVFormat | None:
    """Return the format in which a config wants keys and values cached, or None if it says nothing. Its scales are
    "row" if they are to be found when tokens arrive. Raise ModelLoadError for a format that we have not."""
    scheme, algorithm = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    export = config.get("export")  # of Quark
    if scheme == "static" or (isinstance(export, Mapping) and export.get("kv_cache_group")):  # the first is AutoFP8's
        return KVFormat("fp8_e4m3", "model")
    if scheme is None and algorithm is None:
        return None
    if scheme is None and isinstance(algorithm, str) and algorithm.upper() in ALGORITHMS:
        return KVFormat(ALGORITHMS[algorithm.upper()], "model")
    if isinstance(scheme, Mapping):
        section = Section(scheme, "quantization_config.kv_cache_scheme")
        kind, bits = section.get("type", "float"), section.get("num_bits", 8)
        dynamic, symmetric = section.boolean("dynamic"), section.boolean("symmetric", True)
        whose = dynamic or section.get("strategy", "tensor") in STRATEGIES
        if kind in tuple(TYPES) and bits == 8 and symmetric and whose:
            return KVFormat(TYPES[kind], "row" if dynamic else "model")
    raise ModelLoadError(
        f"config.json wants a KV cache in {str(algorithm if scheme is None else scheme)[:200]}, which we do not have; "
        "say with kv_cache_dtype what to take instead (bfloat16, fp8 or int8)."
    )


def _made_for(config: Mapping[str, Any]) -> str:
    """Return the dtype of the levels that a checkpoint's scales were made for, which is FP8 if it does not say."""
    scheme = config.get("kv_cache_scheme")
    return "int8" if isinstance(scheme, Mapping) and scheme.get("type") == "int" else "fp8_e4m3"


def _any_scales(spec: ModelSpec, weights: WeightMap, stored: Stored) -> bool:
    layers = (index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, AttentionSpec))
    return any(name in stored for index in layers for name in _of_layer(index, weights, stored))


def _of_layer(index: int, weights: WeightMap, stored: Stored) -> tuple[str, str]:
    """Return the names of the keys' and the values' scale of a layer, in the spelling of the files."""
    block = weights[f"layers.{index}.mixer.qkv.weight"][0].name.removesuffix(".weight").rpartition(".")[0]
    if (both := f"{block}.kv_scale") in stored:  # of vLLM's first version
        return both, both
    names = [(f"{block}.{each.format('k')}", f"{block}.{each.format('v')}") for each in SPELLINGS]
    return next(((k, v) for k, v in names if k in stored or v in stored), names[0])


def kv_scale_places(decoder: Decoder, weights: WeightMap, stored: Stored) -> Iterator[Place]:
    """Yield the scales of every cache that has the checkpoint's, with the functions that read them."""
    for index, layer in enumerate(decoder.layers):
        parameter = getattr(layer.mixer, "kv_scales", None)
        if parameter is not None:
            for name, part_G in zip(_of_layer(index, weights, stored), parameter.unbind(1), strict=True):
                yield Place(part_G, partial(_read, name, len(part_G), stored))


def check_kv_scales(decoder: Decoder, weights: WeightMap, stored: Stored) -> None:
    """Raise ModelLoadError if scales of the undivided model's cache are missing, or of another shape."""
    for index, layer in enumerate(decoder.layers):
        if getattr(layer.mixer, "kv_scales", None) is not None:
            for name in _of_layer(index, weights, stored):
                _check(name, decoder.spec.layers[index].attention.num_kv_heads, stored)


def _check(name: str, heads: int, stored: Stored) -> None:
    if name not in stored:
        raise ModelLoadError(
            f"the checkpoint lacks {name}, though it has scales of the KV cache for other layers or for the other of "
            "keys and values; copy it again, or set kv_cache_dtype to bfloat16 or int8."
        )
    shape, dtype = tuple(stored[name].shape), stored[name].dtype
    known = ((), (1,), (1, 1, 1), (heads,), (heads, 1), (heads, 1, 1))
    if shape not in known or dtype not in FLOATS:
        raise ModelLoadError(
            f"the checkpoint holds {name} of the shape {list(shape)} as {dtype}; a KV cache's scale is a number, or "
            f"one for each of the {heads} key heads ([{heads}] or [{heads}, 1, 1]), as {' or '.join(FLOATS)}."
        )


def _read(name: str, heads: int, stored: Stored) -> Tensor:
    return checked_scales(name, stored[name].read()).float().flatten().expand(heads)
