"""Routing on a CPU by the C++ of the folder cpu: one call for the norm, the router, the choice and the order of pairs.

Each of a token's sums goes through its terms in one order, so its routes do not depend on the tokens beside it.

Legend: see op.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.native import library, openmp
from ridgeline.kernels.gemm.route import torch_ops
from ridgeline.kernels.gemm.route.op import Router, Routes

SOURCE = Path(__file__).parent / "cpu" / "route.cpp"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in cpu/


class _Router(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("weight", "bias", "correction", "scale")),
        *((n, ctypes.c_int64) for n in ("experts", "width", "weight_type", "used", "sigmoid", "renormalize")),
        *((n, ctypes.c_int64) for n in ("groups", "top_groups", "by_two")),
        ("factor", ctypes.c_float),
        ("nearness", ctypes.c_float),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "residual", "norm", "live", "sum", "normed")),
        *((n, ctypes.c_void_p) for n in ("expert", "token", "place", "start", "weight", "tally")),
        *((n, ctypes.c_int64) for n in ("tokens", "type", "norm_type", "threads")),
        ("eps", ctypes.c_float),
        ("parallel", ctypes.c_void_p),
    )


Function = Callable[[Any, Any], None]


@cache
def function(target: str = "native") -> Function | None:
    """Return the compiled function, or None where it cannot be compiled."""
    if (found := library(SOURCE, target)) is None:
        return None
    found.route.argtypes, found.route.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return found.route


def route(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
    compiled: Function | None = None,
) -> tuple[Tensor, Tensor, Routes]:
    """Compute what the reference does, or leave it to torch where gradients are wanted or nothing can be compiled.

    compiled: the compiled function (default: the one for this machine).
    """
    given = (x_TM, residual_TM, norm_weight_M, *router[:4])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return torch_ops.route(x_TM, residual_TM, norm_weight_M, eps, router, live_T, tally_E)
    if x_TM.dtype not in TYPES or (compiled := compiled or function()) is None:
        return torch_ops.route(x_TM, residual_TM, norm_weight_M, eps, router, live_T, tally_E)
    tokens, width = x_TM.shape
    how, dtype = router.how, x_TM.dtype
    x_TM = _checked(x_TM, dtype, (tokens, width))
    residual_TM = None if residual_TM is None else _checked(residual_TM, dtype, (tokens, width))
    s_TM = x_TM if residual_TM is None else torch.empty_like(x_TM)
    n_TM = s_TM if norm_weight_M is None else torch.empty_like(x_TM)
    routes = Routes(
        torch.empty(tokens, how.top_k, dtype=torch.int32),
        torch.empty(tokens, how.top_k),
        torch.empty(tokens * how.top_k, dtype=torch.int32),
        torch.empty(tokens, how.top_k, dtype=torch.int32),
        torch.empty(how.experts + 1, dtype=torch.int32),
    )
    weight_EM = _checked(router.weight_EM, router.weight_EM.dtype, (how.experts, width))
    floats = [
        None if x is None else _checked(x.float(), torch.float32, (how.experts,))
        for x in (router.bias_E, router.correction_E, router.expert_scale_E)
    ]
    norm_weight_M = None if norm_weight_M is None else _checked(norm_weight_M, norm_weight_M.dtype, (width,))
    live_T = None if live_T is None else _checked(live_T, torch.bool, (tokens,))
    described = _Router(
        *map(_address, (weight_EM, *floats)),
        how.experts, width, TYPES[weight_EM.dtype], how.top_k, how.score == "sigmoid", how.renormalize,
        how.groups, how.top_groups, how.group_score == "top2", how.scale,
        how.nearness if how.score == "sparsemixer" else -1.0,
    )  # fmt: skip
    written = (routes.expert_TK, routes.token_P, routes.place_TK, routes.start_E1, routes.weight_TK, tally_E)
    call = _Call(
        *map(_address, (x_TM, residual_TM, norm_weight_M, live_T, s_TM, n_TM, *written)),
        tokens, TYPES[dtype], 0 if norm_weight_M is None else TYPES[norm_weight_M.dtype], torch.get_num_threads(), eps,
        openmp(),
    )  # fmt: skip
    compiled(ctypes.byref(described), ctypes.byref(call))
    return n_TM, s_TM, routes


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _checked(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return x as C reads it. Raises ValueError if it is not what the router needs."""
    if x.shape != shape or x.dtype != dtype or dtype not in (*TYPES, torch.bool) or x.device.type != "cpu":
        raise ValueError(f"routing needs {dtype} {list(shape)} on a CPU, got {x.dtype} {list(x.shape)}.")
    return x.contiguous()
