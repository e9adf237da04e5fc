"""The ops that become kernels, and how each is said in MLIR's dialects `arith` and `math`.

A pointwise op takes operands of one dtype, of shapes that broadcast. Numbers of 16 bits are computed in float32:
capture says so with casts, hence a fused kernel rounds where torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TAKEN = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}  # dtype → MLIR's name
FLOATS = (torch.float32, torch.float64)  # what pointwise ops compute in
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PointwiseOp:
    """plain: the same function of torch. floating, integer: the operation of MLIR ("": none). compares: the result is
    of bool, and the name a predicate."""

    plain: Callable[..., Any]
    arity: int
    floating: str = ""
    integer: str = ""
    compares: bool = False


POINTWISE = {
    "add": PointwiseOp(torch.add, 2, "arith.addf", "arith.addi"),
    "sub": PointwiseOp(torch.sub, 2, "arith.subf", "arith.subi"),
    "mul": PointwiseOp(torch.mul, 2, "arith.mulf", "arith.muli"),
    "div": PointwiseOp(torch.div, 2, "arith.divf"),
    "maximum": PointwiseOp(torch.maximum, 2, "arith.maximumf", "arith.maxsi"),
    "minimum": PointwiseOp(torch.minimum, 2, "arith.minimumf", "arith.minsi"),
    "neg": PointwiseOp(torch.neg, 1, "arith.negf"),
    "abs": PointwiseOp(torch.abs, 1, "math.absf"),
    "exp": PointwiseOp(torch.exp, 1, "math.exp"),
    "log": PointwiseOp(torch.log, 1, "math.log"),
    "sqrt": PointwiseOp(torch.sqrt, 1, "math.sqrt"),
    "tanh": PointwiseOp(torch.tanh, 1, "math.tanh"),
    "erf": PointwiseOp(torch.erf, 1, "math.erf"),
    "sin": PointwiseOp(torch.sin, 1, "math.sin"),
    "cos": PointwiseOp(torch.cos, 1, "math.cos"),
    "eq": PointwiseOp(torch.eq, 2, "oeq", "eq", compares=True),
    "ne": PointwiseOp(torch.ne, 2, "une", "ne", compares=True),
    "lt": PointwiseOp(torch.lt, 2, "olt", "slt", compares=True),
    "le": PointwiseOp(torch.le, 2, "ole", "sle", compares=True),
    "gt": PointwiseOp(torch.gt, 2, "ogt", "sgt", compares=True),
    "ge": PointwiseOp(torch.ge, 2, "oge", "sge", compares=True),
    "where": PointwiseOp(torch.where, 3),
    "cast": PointwiseOp(torch.Tensor.to, 1),
}


@dataclass(frozen=True)
class ReductionOp:
    """plain: the same function of torch. combine: the pointwise op of two numbers. start: of nothing."""

    plain: Callable[..., Any]
    combine: str
    start: float


REDUCTIONS = {
    "sum": ReductionOp(torch.sum, "add", 0.0),
    "amax": ReductionOp(torch.amax, "maximum", -math.inf),
    "amin": ReductionOp(torch.amin, "minimum", math.inf),
}
