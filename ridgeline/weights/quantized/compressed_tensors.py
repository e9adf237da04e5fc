"""The method "compressed-tensors" of llm-compressor: groups of modules, each with a scheme for weights and activations.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import BLOCK, Activations, CodedFormat, Held, Int8Format
from ridgeline.kernels.gemm.codes.op import packed
from ridgeline.weights.quantized.four_bits import mxfp4_piece, nvfp4_piece
from ridgeline.weights.quantized.fp8 import block_piece, scaled_piece
from ridgeline.weights.quantized.gptq import order, stream
from ridgeline.weights.quantized.names import matches
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Piece,
    Read,
    Section,
    Stored,
    Wanted,
    check_divides,
    dtype_of,
    finite_scales,
    little_endian_bytes,
    per_output,
)

FORMATS = (
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group", "token", "attn_head")


@dataclass(frozen=True)
class Numbers:
    """The way in which weights or activations are rounded."""

    type: str
    bits: int
    strategy: str
    group: int
    symmetric: bool
    dynamic: bool
    ordered: bool

    def __str__(self) -> str:
        return f"{self.type}{self.bits} by {self.strategy}{f' of {self.group}' if self.group else ''}"


@dataclass(frozen=True)
class Group:
    """Modules with one scheme. weights None: they stay as they are."""

    targets: tuple[str, ...]
    weights: Numbers | None
    inputs: Numbers | None
    form: str
    place: str


class CompressedTensors:
    """See `Method`."""

    label = "compressed-tensors"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        form = section.choice("format", FORMATS, "naive-quantized")
        sparse = section.section("sparsity_config")
        if sparse is not None and sparse.get("format", "dense") != "dense":
            raise sparse.wrong("format", sparse.get("format"), "dense, since sparse weights are not read")
        if section.get("transform_config") not in (None, {}) and config["transform_config"].get("config_groups"):
            raise section.wrong("transform_config", "transforms", "absent, since none are computed")
        groups = section.section("config_groups")
        if (groups is None or not groups.values) and section.get("kv_cache_scheme") is None:
            raise section.wrong("config_groups", None, "an object with the scheme of each group of modules")
        self.groups = [self._group(groups, key, form) for key in groups.values] if groups else []
        self.ignored = section.names("ignore")

    @staticmethod
    def _group(groups: Section, key: str, form: str) -> Group:
        section = groups.section(key)
        if section is None:
            raise groups.wrong(key, None, "an object")
        return Group(
            targets=section.names("targets"),
            weights=_numbers(section.section("weights")),
            inputs=_numbers(section.section("input_activations")),
            form=section.choice("format", FORMATS, form),
            place=section.place,
        )

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or "Linear" in self.ignored or any(matches(name, each) for each in self.ignored):
            return None
        group = self._of(name)
        if group is None or group.weights is None:
            return None
        return _scheme(group)(name, shape, group, stored)

    def _of(self, name: str) -> Group | None:
        """Return the group of a module: one that names it comes before one that names its class."""
        for group in self.groups:
            if any(matches(name, target) for target in group.targets):
                return group
        return next((group for group in self.groups if "Linear" in group.targets), None)


Scheme = Callable[[str, tuple[int, ...], Group, Stored | None], Piece]


def _numbers(section: Section | None) -> Numbers | None:
    if section is None:
        return None
    group, structure = section.get("group_size", 0), section.get("block_structure")
    if not isinstance(group, int) or isinstance(group, bool) or group < -1 or (group > 0 and group % 8):
        raise section.wrong("group_size", group, "a multiple of 8")
    strategy = section.choice("strategy", STRATEGIES, "group" if group > 0 else "tensor")
    if structure is not None and structure != [BLOCK, BLOCK]:
        raise section.wrong("block_structure", structure, f"[{BLOCK}, {BLOCK}]")
    dynamic = section.get("dynamic", False)
    if dynamic not in (True, False, "local"):
        raise section.wrong("dynamic", dynamic, "true, false or local")
    return Numbers(
        type=section.choice("type", ("int", "float"), "int"),
        bits=section.integer("num_bits", (2, 3, 4, 5, 6, 8, 16), 8),
        strategy=strategy,
        group=max(group, 0),
        symmetric=section.boolean("symmetric", True),
        dynamic=dynamic is not False,
        ordered=section.get("actorder") in ("group", True),
    )


def _scheme(group: Group) -> Scheme:
    """Return the reader of a group's weights. Raise ModelLoadError, with the scheme's name, if there is none."""
    w, x = group.weights, group.inputs
    assert w is not None
    match (group.form, w.type, w.bits):
        case ("float-quantized" | "naive-quantized", "float", 8) if w.strategy in ("tensor", "channel", "block"):
            return _fp8
        case ("int-quantized" | "naive-quantized", "int", 8) if w.symmetric and w.strategy in ("tensor", "channel"):
            return _int8 if x is not None and x.type == "int" and x.bits == 8 and x.symmetric else _int8_weights
        case ("pack-quantized", "int", 2 | 3 | 4 | 5 | 6 | 8) if w.strategy in ("group", "channel"):
            return _packed
        case ("mxfp4-pack-quantized", "float", 4):
            return _mxfp4
        case ("nvfp4-pack-quantized", "float", 4):
            return _nvfp4
    raise ModelLoadError(
        f"config.json's {group.place} has weights in {w} as {group.form}, which we do not read; known are float8, "
        "int8, packed int2 to int6 and int8, MXFP4 and NVFP4."
    )


def _fp8(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    w, x, scale = group.weights, group.inputs, f"{name}.weight_scale"
    assert w is not None
    if w.strategy == "block":
        return block_piece(name, shape, scale, None if x is None else "block")
    activations: Activations | None = None
    if x is not None:
        activations = "token" if x.dynamic or x.strategy != "tensor" else "static"
    return scaled_piece(name, shape, scale, activations, f"{name}.input_scale")


def _int8(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    """Return levels. Activations get a scale for each token, also where the file has a static one, which is coarser.
    Where they have zero points, whose grid lies closer about what is on one side of 0, they are not rounded at all."""
    outputs = shape[0]
    scale = per_output(finite_scales(f"{name}.weight_scale"), outputs)
    return Piece(
        held=Held(format=Int8Format()),
        tensors={**_int8_tensors(name, shape), **_of_activations(name)},
        read={"level_OI": lambda files: files(f"{name}.weight"), "scale_O": lambda files: scale(files).flatten()},
        label="int8",
    )


def _int8_weights(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    return Piece(
        held=Held(format=CodedFormat(bits=8, group=0)),
        tensors={**_int8_tensors(name, shape), **_of_activations(name)},
        read={
            "code_OB": lambda files: files(f"{name}.weight").view(torch.uint8) ^ 128,
            "scale_OG": per_output(finite_scales(f"{name}.weight_scale"), shape[0]),
        },
        label="int8",
    )


def _int8_tensors(name: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
    outputs, inputs = shape
    return {
        f"{name}.weight": Wanted(((outputs, inputs),), ("I8",)),
        f"{name}.weight_scale": Wanted(((), (1,), (outputs,), (outputs, 1)), FLOATS),
    }


def _of_activations(name: str) -> dict[str, Wanted]:
    """Return the tensors about activations that we have no use for."""
    return {
        f"{name}.input_scale": Wanted(((), (1,)), FLOATS, optional=True),
        f"{name}.input_zero_point": Wanted(((), (1,)), ("I8", "I32"), optional=True),
        f"{name}.azp_adj": Wanted(((),), ("I32",), optional=True),
    }


def _packed(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    """Return codes in words of 32 bits along the inputs. Zeros are packed along the outputs."""
    w, (outputs, inputs) = group.weights, shape
    assert w is not None
    each = w.group if w.strategy == "group" else 0
    check_divides(name, inputs, each)
    groups, bits, ordered = inputs // (each or inputs), w.bits, w.ordered
    codes_name = f"{name}.weight_packed"
    whole = stored is not None and codes_name in stored and stored[codes_name].shape[-1] != _words(inputs, bits)[0]
    tensors = {
        codes_name: Wanted(((outputs, _words(inputs, bits)[whole]),), ("I32",)),
        f"{name}.weight_scale": Wanted(((outputs, groups),), FLOATS),
        f"{name}.weight_shape": Wanted(((2,),), ("I64", "I32"), optional=True),
        f"{name}.weight_zero_point": Wanted(((_words(outputs, bits)[whole], groups),), ("I32",), optional=w.symmetric),
        f"{name}.weight_g_idx": Wanted(((inputs,),), ("I32", "I64"), optional=not ordered),
    }

    def codes(files: Callable[[str], Tensor]) -> Tensor:
        if f"{name}.weight_shape" in (stored or ()) and files(f"{name}.weight_shape").tolist() != [outputs, inputs]:
            raise ModelLoadError(
                f"{name}.weight_shape says {files(f'{name}.weight_shape').tolist()}, and config.json "
                f"{[outputs, inputs]}; copy the model again."
            )
        words_OW = files(codes_name)
        if not ordered and 8 % bits == 0:
            return little_endian_bytes(words_OW)[:, : inputs * bits // 8]
        code_OI = _unpacked(words_OW, bits, inputs, whole)
        if ordered:
            code_OI = code_OI[:, order(files(f"{name}.weight_g_idx"), each, f"{name}.weight_g_idx").long()]
        return packed(code_OI, bits)

    def zeros(files: Callable[[str], Tensor]) -> Tensor:
        return _unpacked(files(f"{name}.weight_zero_point").T, bits, outputs, whole).T

    read: dict[str, Read] = {"code_OB": codes, "scale_OG": finite_scales(f"{name}.weight_scale")}
    if not w.symmetric:
        read["zero_OG"] = zeros
    if ordered:
        read["order_I"] = lambda files: order(files(f"{name}.weight_g_idx"), each, f"{name}.weight_g_idx")
    held = Held(
        format=CodedFormat(bits=bits, group=each, zeros="middle" if w.symmetric else "levels"),
        scales=dtype_of(stored, f"{name}.weight_scale", "bfloat16"),
        ordered=ordered,
    )
    return Piece(held=held, tensors=tensors, read=read, label=f"int{bits}")


def _words(numbers: int, bits: int) -> tuple[int, int]:
    """Return the number of words that numbers take in a stream, and True if each is whole in one word, as it was
    once."""
    return -(-numbers * bits // 32), -(-numbers // (32 // bits))


def _unpacked(words: Tensor, bits: int, count: int, whole: bool) -> Tensor:
    """Return the first `count` numbers of words along the last dimension, uint8. whole: each is in one word."""
    if not whole:
        return stream(little_endian_bytes(words), bits)[..., :count]
    mask = (1 << bits) - 1
    numbers = torch.stack([(words >> bits * place) & mask for place in range(32 // bits)], -1)
    return numbers.to(torch.uint8).flatten(-2)[..., :count]


def _mxfp4(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    return mxfp4_piece(name, shape, f"{name}.weight_packed")


def _nvfp4(name: str, shape: tuple[int, ...], group: Group, stored: Stored | None) -> Piece:
    factor, unused = f"{name}.weight_global_scale", f"{name}.input_global_scale"
    return nvfp4_piece(name, shape, f"{name}.weight_packed", factor, unused, inverse=True)
