"""Products of weights in codes on a CPU, by the C++ of the folder cpu: activations are rounded to int8 on arrival.

Each 32 neighbouring inputs of a token have a step of their own, the largest magnitude of theirs over 127. Products and
their sums are whole numbers until a step and a scale multiply them.

Legend:
    T  tokens
    I  inputs
    O  outputs
    P  panels of 16 outputs
    R  runs of 32 inputs
    G  groups of a row
    S  runs of 256 inputs of a row
    B  bytes of a run of a panel
    L  the sixteen outputs of a panel
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.native import library, openmp
from ridgeline.kernels.base.onednn import in_large_pages
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes import op
from ridgeline.kernels.gemm.codes.op import TABLES, Coded
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.op import linear as plain_linear
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm

SOURCE = Path(__file__).parent / "cpu" / "panels.cpp"
LANES, RUN, VECTORS = 16, 32, 8  # as in cpu/
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LONGEST = 1 << 16  # inputs of a row: sums of so many products of bytes fit in 32 bits
PIECE = 4096  # rows that are laid out at once, since that takes some copies of them

# What the sixteen codes of a table stand for, as (levels, what is subtracted from them, the value of a level)
LEVELS = {
    "e2m1": ([int(2 * x) + 12 for x in TABLES["e2m1"]], 12, 0.5),
    "nf4": ([round(127 * x) + 127 for x in TABLES["nf4"]], 127, 1 / 127),
    "iq1": ([int(8 * x) + 9 for x in TABLES["iq1"]], 9, 1 / 8),
    "iq2": ([int(8 * x) + 43 for x in TABLES["iq2"]], 43, 1 / 8),
    "iq3": ([int(2 * x) + 31 for x in TABLES["iq3"]], 31, 0.5),
    "iq3_s": ([int(x) + 15 for x in TABLES["iq3_s"]], 15, 1.0),
    "iq4": ([int(x) + 127 for x in TABLES["iq4"]], 127, 1.0),
}


class _Weight(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("code", "scale", "minimum", "outer", "outer_minimum", "factor", "table")
        ),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "runs", "bits", "group", "middle")),
        ("by_token", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "norm", "bias", "sum", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "type", "norm_type", "threads", "tiles")),
        ("eps", ctypes.c_double),
        ("parallel", ctypes.c_void_p),
    )


Multiply = Callable[[Any, Any], int]


@cache
def multiply(target: str = "native") -> Multiply | None:
    """Return the compiled function, or None where it cannot be compiled."""
    if (found := library(SOURCE, target)) is None:
        return None
    function = found.multiply
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    return function


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight laid out for cpu/panels.cpp.

    parts: the tensors that `weight` points to, the codes first.
    """

    parts: tuple[Tensor | None, ...]
    order_I: Tensor | None
    inputs: int
    outputs: int
    weight: _Weight
    function: Multiply

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.parts, self.order_I) if x is not None)

    @property
    def stored(self) -> Tensor:
        code = self.parts[0]
        assert code is not None
        return code


def holds_values(how: CodedFormat) -> bool:
    """Return True if panels can hold the values of such codes: levels, or multiples of one number."""
    return how.values == "levels" or how.values in LEVELS


def pack(weight: Coded, function: Multiply | None = None) -> Panels | None:
    """Lay a weight out. Return None if its groups do not fit into runs, if the values of its table are no multiples of
    one number (bitsandbytes' FP4, E4M3), or without the compiled function.

    function: the compiled function (default: the one for this machine).
    """
    how, inputs, outputs = weight.format, weight.inputs, weight.code_OB.shape[0]
    groups = weight.scale_OG.shape[-1]
    each, runs = inputs // groups, -(-inputs // RUN)
    fits = (each == LANES or each % RUN == 0 or groups == 1) and inputs <= LONGEST
    fits = fits and holds_values(how)
    function = function or multiply()
    if not fits or function is None:
        return None
    levels, middle, unit = LEVELS.get(how.values, (None, 1 << how.bits - 1 if how.zeros == "middle" else 0, 1.0))
    scales = _nested_scales(weight) if how.nested else _scales(weight)
    scale_PGL, minimum_PGL, outer_PSL, outer_minimum_PSL, factor_O = scales
    if how.zeros == "levels" and weight.zero_OG is None:
        middle = 1 << how.bits - 1
    table = None if levels is None else torch.tensor(levels * 4, dtype=torch.uint8)
    if each == LANES and runs * 2 != groups:
        scale_PGL = F.pad(scale_PGL, (0, 0, 0, 1))
        minimum_PGL = None if minimum_PGL is None else F.pad(minimum_PGL, (0, 0, 0, 1))
    group = LANES if each == LANES else runs * RUN if groups == 1 else each
    return _panels(
        (_laid_out(weight), scale_PGL, minimum_PGL, outer_PSL, outer_minimum_PSL, factor_O * unit, table),
        weight.order_I,
        function,
        inputs=inputs, outputs=outputs, runs=runs, bits=how.bits, group=group, middle=middle,
    )  # fmt: skip


def pack_levels(weight: Levels, function: Multiply | None = None) -> Panels | None:
    """Lay out int8 levels with a scale for each output, as the op `w8a8_linear` has them: a token's activations then
    have one step."""
    function = function or multiply()
    level_OI, scale_O, _ = weight
    outputs, inputs = level_OI.shape
    if function is None or inputs > LONGEST:
        return None
    runs, panels = -(-inputs // (2 * RUN)) * 2, -(-outputs // LANES)  # tiles are of two runs
    level_OI = F.pad(level_OI, (0, runs * RUN - inputs))
    code = _laid_out_codes(level_OI, CodedFormat(bits=8, group=0), lambda rows: (rows.int() + 128).to(torch.uint8))
    factor_O = F.pad(scale_O.float(), (0, panels * LANES - outputs))
    parts = (code, torch.ones(panels, 1, LANES, dtype=torch.float16), None, None, None, factor_O, None)
    sizes = {"inputs": inputs, "outputs": outputs, "runs": runs, "bits": 8, "group": runs * RUN, "middle": 128}
    return _panels(parts, None, function, **sizes, by_token=1)


def _panels(parts: tuple[Tensor | None, ...], order_I: Tensor | None, function: Multiply, **sizes: int) -> Panels:
    kept = tuple(None if x is None else in_large_pages(x.contiguous()) for x in parts)
    weight = _Weight(*(None if x is None else x.data_ptr() for x in kept), **sizes)
    return Panels(kept, order_I, sizes["inputs"], sizes["outputs"], weight, function)


def _scales(weight: Coded) -> tuple[Tensor, Tensor | None, None, None, Tensor]:
    """Return the scales and minima relative to the largest of their row, in float16, and that as a factor."""
    scale_OG, zero_OG = weight.scales()
    minimum_OG = scale_OG * zero_OG if zero_OG is not None and weight.format.zeros == "levels" else zero_OG
    factor_O = scale_OG.abs().amax(-1)
    if minimum_OG is not None:
        factor_O = torch.maximum(factor_O, minimum_OG.abs().amax(-1))
    factor_O = torch.where(factor_O == 0, 1.0, factor_O)
    scale_PGL, minimum_PGL = (
        None if x is None else _in_lanes((x / factor_O[:, None]).half()) for x in (scale_OG, minimum_OG)
    )
    assert scale_PGL is not None
    return scale_PGL, minimum_PGL, None, None, _filled(factor_O)


def _nested_scales(weight: Coded) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    factor_O = torch.ones(len(weight.code_OB)) * (1.0 if weight.scale is None else weight.scale.item())
    scale_PGL, minimum_PGL, outer_PSL, outer_minimum_PSL = (
        None if x is None else _in_lanes(x)
        for x in (weight.scale_OG, weight.zero_OG, weight.outer_OS, weight.outer_minimum_OS)
    )
    assert scale_PGL is not None
    assert outer_PSL is not None
    return scale_PGL, minimum_PGL, outer_PSL, outer_minimum_PSL, _filled(factor_O)


def _filled(x: Tensor) -> Tensor:
    """Return x with zeros behind its outputs, to whole panels."""
    return torch.cat((x, x.new_zeros(-len(x) % LANES, *x.shape[1:])))


def _in_lanes(x_OG: Tensor) -> Tensor:
    return _filled(x_OG).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _laid_out(weight: Coded) -> Tensor:
    return _laid_out_codes(weight.code_OB, weight.format, lambda rows: weight._replace(code_OB=rows).codes())


def _laid_out_codes(rows_O: Tensor, how: CodedFormat, codes: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the codes of all rows: uint8 [P, R, B]. `codes` gives those of some rows, [O, I]."""
    pieces = []
    for rows in rows_O.split(PIECE):
        code_OI = _filled(codes(rows))
        code_OI = F.pad(code_OI, (0, -code_OI.shape[1] % RUN))
        code_PRVLI = code_OI.view(len(code_OI) // LANES, LANES, -1, VECTORS, 4).permute(0, 2, 3, 1, 4)
        planes, shift = [], 0
        for width in how.planes():
            plane = code_PRVLI >> shift & (1 << width) - 1
            plane = plane.unflatten(2, (VECTORS // width, width))  # vector v is at [v // width, v % width]
            byte = torch.zeros_like(plane[:, :, 0])
            for place in range(VECTORS // width):
                byte |= plane[:, :, place] << place * width
            planes.append(byte.flatten(2))
            shift += width
        pieces.append(torch.cat(planes, -1))
    return torch.cat(pieces)


def product(x: Operand, weight: Panels, bias_O: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (y, s): y is the linear map of the operand."""
    x_TI, residual_TI, norm_weight_I, eps = x
    if weight.order_I is not None:
        if norm_weight_I is not None:
            n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
            return product(Operand(n_TI), weight, bias_O)[0], s_TI
        if residual_TI is not None:
            s_TI = x.summed()
            return product(Operand(s_TI), weight, bias_O)[0], s_TI
        x_TI = x_TI.index_select(1, weight.order_I)
    x_TI = _checked(x_TI, x_TI.dtype, (len(x_TI), weight.inputs))
    y_TO = x_TI.new_empty(len(x_TI), weight.outputs)
    s_TI, call = x_TI, _Call()
    if residual_TI is not None:
        residual_TI = _checked(residual_TI, x_TI.dtype, tuple(x_TI.shape))
        s_TI = torch.empty_like(x_TI)
        call.residual, call.sum = residual_TI.data_ptr(), s_TI.data_ptr()
    if norm_weight_I is not None:
        norm_weight_I = _checked(norm_weight_I, norm_weight_I.dtype, (weight.inputs,))
        call.norm, call.norm_type, call.eps = norm_weight_I.data_ptr(), TYPES[norm_weight_I.dtype], eps
    if bias_O is not None:
        bias_O = _checked(bias_O, x_TI.dtype, (weight.outputs,))
        call.bias = bias_O.data_ptr()
    call.x, call.y, call.tokens, call.type = x_TI.data_ptr(), y_TO.data_ptr(), len(x_TI), TYPES[x_TI.dtype]
    call.threads, call.parallel, call.tiles = torch.get_num_threads(), openmp(), has_tiles()
    if weight.function(ctypes.byref(weight.weight), ctypes.byref(call)):
        raise MemoryError(f"no memory is left to round {len(x_TI)} tokens of {weight.inputs} inputs.")
    return y_TO, s_TI


@cache
def has_tiles() -> bool:
    """Return True if this process may multiply tiles (AMX), which Linux must be asked for."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def _checked(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return x as C reads it. Raises ValueError if it is not what the weight needs."""
    if x.shape != shape or x.dtype != dtype or dtype not in TYPES or x.device.type != "cpu":
        raise ValueError(f"the product needs {dtype} {list(shape)} on a CPU, got {x.dtype} {list(x.shape)}.")
    return x.contiguous()


def linear(x_TI: Tensor, weight: Panels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.coded_linear` with a weight that is laid out."""
    return product(Operand(x_TI), weight, bias_O)[0]


def norm_linear(x: Operand, weight: Panels, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `op.coded_norm_linear` with a weight that is laid out."""
    y_TO, s_TI = product(x, weight, epilogue.bias_O)
    return (gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO), s_TI


def coded_linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    """Compute `op.coded_linear`. The weight is laid out for this call alone, or dequantized if it cannot be."""
    packed = pack(weight)
    if packed is not None:
        return linear(x_TI, packed, bias_O)
    return plain_linear(x_TI, weight.dequantized().to(x_TI.dtype), bias_O)


def coded_norm_linear(x: Operand, weight: Coded, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `op.coded_norm_linear` likewise."""
    packed = pack(weight)
    if packed is not None:
        return norm_linear(x, packed, epilogue)
    return op.coded_norm_linear(x, weight, epilogue)
