"""The method "torchao" of PyTorch: int4 and int8 integers and FP8, as it flattens its tensors into safetensors.

The tensors say what they are: `_weight_qdata` holds two codes of four bits in a byte, whole numbers, or E4M3. The
config only says what becomes of activations.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import Activations, CodedFormat, Fp8Format, Held, Int8Format
from ridgeline.kernels.gemm.codes.op import packed
from ridgeline.weights.quantized.names import among, pattern
from ridgeline.weights.quantized.piece import (
    FLOATS,
    Files,
    Piece,
    Read,
    Section,
    Stored,
    Wanted,
    finite_scales,
    per_output,
    times_inputs,
)

_INT4, _INT8, _FLOAT8 = "U8", "I8", "F8_E4M3"  # dtypes of the codes


class Torchao:
    """See `Method`. Activations are rounded where the config's name says so, to int8 or E4M3 with a scale for each
    token, if the weights have a scale for each output."""

    label = "torchao"
    tied = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = Section(config)
        kind = section.section("quant_type")
        default = None if kind is None else kind.section("default")
        if default is None:
            raise section.wrong("quant_type", section.get("quant_type"), "an object that torchao writes (`default`)")
        self.default = default
        self.skipped = section.names("modules_to_not_convert")

    def piece(self, name: str, shape: tuple[int, ...], stored: Stored | None) -> Piece | None:
        if len(shape) != 2 or among(name, self.skipped):
            return None
        kind, data = self._kind(name)
        if stored is None:
            dtype, groups = _by_name(kind), shape[1] // _group(data)
        else:
            codes, scale = (stored.get(f"{name}._weight_{part}") for part in ("qdata", "scale"))
            if codes is None and scale is None:
                _check_known(name, stored)
                return None
            if codes is None or scale is None:
                lacking = f"{name}._weight_{'qdata' if codes is None else 'scale'}"
                raise ModelLoadError(f"the checkpoint lacks {lacking}, which torchao's weights need; copy it again.")
            dtype, groups = codes.dtype, _groups(scale.shape, shape, codes.dtype)
        if dtype is None:
            return None
        zeros = "Intx" in kind or _any(stored, f"{name}._weight_zero_point")
        piece = _piece(name, shape, dtype, groups, dynamic="Dynamic" in kind, zeros=zeros)
        factor = f"{name}._weight_act_pre_scale"
        return times_inputs(piece, factor, shape[1]) if stored is not None and factor in stored else piece

    def _kind(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the config of a module: its name and its entries."""
        found: Any = self.default.values
        data = found.get("_data")
        modules = data.get("fqn_to_config", data.get("module_fqn_to_config")) if isinstance(data, Mapping) else None
        if isinstance(modules, Mapping):
            keys = [key for key in modules if key in (name, f"{name}.weight") or _is_pattern(key, name)]
            found = modules.get(keys[0] if keys else "_default") or {}
        data = found.get("_data") if isinstance(found, Mapping) else None
        kind = found.get("_type") if isinstance(found, Mapping) else None
        return str(kind), data if isinstance(data, Mapping) else {}


def _any(stored: Stored | None, name: str) -> bool:
    """Return True if the files hold a tensor of that name that is not zero everywhere, as symmetric zeros are."""
    return stored is not None and name in stored and bool(stored[name].read().any())


def _is_pattern(key: Any, name: str) -> bool:
    return isinstance(key, str) and key.startswith("re:") and re.fullmatch(pattern(key[3:]), name) is not None


def _by_name(kind: str) -> str | None:
    """Return the dtype of the codes of a config, by its name."""
    return next(
        (dtype for word, dtype in (("Int4", _INT4), ("Int8", _INT8), ("Float8", _FLOAT8)) if word in kind), None
    )


def _group(data: Mapping[str, Any]) -> int:
    group = data.get("group_size")
    return group if isinstance(group, int) and not isinstance(group, bool) and group > 0 else 128


def _groups(scales: list[int], shape: tuple[int, ...], dtype: str) -> int:
    """Return the groups of a row by the scales, which lie the other way round beside codes of four bits."""
    if len(scales) != 2:
        return 1
    return scales[0] if dtype == _INT4 else scales[1]


def _check_known(name: str, stored: Stored) -> None:
    """Raise ModelLoadError if the module's tensors are of a layout that we do not read."""
    if f"{name}.weight" not in stored and any(each.startswith(f"{name}._weight_") for each in stored):
        raise ModelLoadError(
            f"the checkpoint holds {name} in a layout of torchao without qdata and scale, which we do not read; "
            "quantize it with Int4WeightOnlyConfig, Int8WeightOnlyConfig or a Float8 config of version 2."
        )


def _piece(name: str, shape: tuple[int, ...], dtype: str, groups: int, *, dynamic: bool, zeros: bool) -> Piece:
    if dtype == _INT4:
        return _int4(name, shape, groups)
    if dtype == _INT8 and (groups > 1 or zeros):
        return _int8_groups(name, shape, groups, zeros=zeros)
    if dtype == _INT8:
        return _int8(name, shape, dynamic=dynamic)
    if dtype == _FLOAT8 and groups == 1:
        return _float8(name, shape, dynamic=dynamic)
    raise ModelLoadError(
        f"the checkpoint holds {name}._weight_qdata as {dtype} with {groups} scales for each output; of torchao we "
        "read int4, int8, and float8 with a scale for each output or one for all."
    )


def _int4(name: str, shape: tuple[int, ...], groups: int) -> Piece:
    """Return a weight = scale · (code - 8) + zero, in which the file's zeros are numbers."""
    (outputs, inputs), codes = shape, f"{name}._weight_qdata"
    scale, zero = f"{name}._weight_scale", f"{name}._weight_zero_point"
    group = _whole(name, inputs, groups)

    def minimum(files: Files) -> Tensor:
        return (8 * files(scale).float() - finite_scales(zero, above=False, zero=True)(files).float()).T

    return Piece(
        held=Held(format=CodedFormat(bits=4, group=group, zeros="minimum"), scales="float32"),
        tensors={
            codes: Wanted(((outputs, inputs // 2),), (_INT4, _INT8)),
            scale: Wanted(((groups, outputs),), FLOATS),
            zero: Wanted(((groups, outputs),), FLOATS),
        },
        read={
            "code_OB": lambda files: files(codes).view(torch.uint8) ^ 0x88,
            "scale_OG": lambda files: finite_scales(scale)(files).float().T,
            "zero_OG": minimum,
        },
        label="torchao int4",
    )


def _int8_groups(name: str, shape: tuple[int, ...], groups: int, *, zeros: bool) -> Piece:
    (outputs, inputs), codes = shape, f"{name}._weight_qdata"
    scale, zero = f"{name}._weight_scale", f"{name}._weight_zero_point"
    group = _whole(name, inputs, groups)
    read: dict[str, Read] = {
        "code_OB": lambda files: packed(_from_zero(files(codes)), 8),
        "scale_OG": lambda files: finite_scales(scale)(files).float().view(outputs, groups),
    }
    shapes = ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)
    tensors = {
        codes: Wanted(((outputs, inputs),), (_INT8,)),
        scale: Wanted(shapes, FLOATS),
        zero: Wanted(shapes, (_INT8,), optional=not zeros),
    }
    if zeros:
        read["zero_OG"] = lambda files: _from_zero(files(zero)).view(outputs, groups)
    how = CodedFormat(bits=8, group=group, zeros="levels" if zeros else "middle")
    return Piece(held=Held(format=how, scales="float32"), tensors=tensors, read=read, label="torchao int8")


def _from_zero(levels: Tensor) -> Tensor:
    """Return signed levels as codes that begin with 0."""
    return levels.view(torch.uint8) ^ 0x80


def _int8(name: str, shape: tuple[int, ...], *, dynamic: bool) -> Piece:
    (outputs, inputs), codes, scale = shape, f"{name}._weight_qdata", f"{name}._weight_scale"
    return Piece(
        held=Held(format=Int8Format(rounds=dynamic)),
        tensors={
            codes: Wanted(((outputs, inputs),), (_INT8,)),
            scale: Wanted(((outputs, 1), (outputs,), (1, 1), (1,), ()), FLOATS),
            f"{name}._weight_zero_point": Wanted(((outputs, 1), (outputs,), (1, 1), (1,), ()), (_INT8,), optional=True),
        },
        read={
            "level_OI": lambda files: files(codes),
            "scale_O": lambda files: per_output(finite_scales(scale), outputs)(files).flatten(),
        },
        label="torchao int8",
    )


def _float8(name: str, shape: tuple[int, ...], *, dynamic: bool) -> Piece:
    (outputs, inputs), codes, scale = shape, f"{name}._weight_qdata", f"{name}._weight_scale"
    activations: Activations | None = "token" if dynamic else None
    return Piece(
        held=Held(format=Fp8Format(activations=activations)),
        tensors={
            codes: Wanted(((outputs, inputs),), (_FLOAT8,)),
            scale: Wanted(((outputs, 1), (outputs,), (1, 1), (1,), ()), FLOATS),
        },
        read={
            "weight_OI": lambda files: files(codes),
            "scale_SC": per_output(finite_scales(scale), outputs),
        },
        label="torchao float8",
    )


def _whole(name: str, inputs: int, groups: int) -> int:
    """Return the inputs of a group, 0 if there is one. Raise ModelLoadError if groups do not divide them."""
    if groups < 1 or inputs % groups or inputs // groups % 8:
        raise ModelLoadError(
            f"the checkpoint holds {name}._weight_scale for {groups} groups, which the {inputs} inputs do not divide "
            "into; copy it again."
        )
    return inputs // groups if groups > 1 else 0
