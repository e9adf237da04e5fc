"""Experts' products on a GPU: rows of the touched experts for a few tokens, tiles on the matrix units for more.

If a gradient is wanted, plain torch runs, since these kernels have none. On Hopper the kernels of hopper.py run where
they support a product of more than a few tokens.

`down_rows_kernel` reads the routes without waiting, so between `route` and it there must be a kernel of which every
program has waited before it lets the next one start. All kernels of `grouped_gate_up` here do so.

Legend: see op.py
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.launch import INTERPRETED, compute_capability, launch_options, shared_memory
from ridgeline.kernels.base.routing import PRODUCTS, UNGATED
from ridgeline.kernels.gemm.experts import matrices, quantized, torch_ops
from ridgeline.kernels.gemm.experts.choose import (
    FIXED,
    FP8_ROWS,
    WIDENED,
    Rows,
    Tiles,
    Widened,
    choose_down,
    choose_gate_up,
    choose_quantized,
    choose_shared,
    choose_tiles,
    row_tiles,
)
from ridgeline.kernels.gemm.experts.combine import combine
from ridgeline.kernels.gemm.experts.forms import PLAIN, form_of, tensors
from ridgeline.kernels.gemm.experts.matrices import Matrices, Quantized, is_mxfp8, shape_of
from ridgeline.kernels.gemm.experts.packed import Packed
from ridgeline.kernels.gemm.experts.rows import down_rows_kernel, gate_up_rows_kernel
from ridgeline.kernels.gemm.experts.tiles import grouped_tiles_kernel
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.small.activation.triton import activation

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def grouped_gate_up(
    x_TM: Tensor,
    weight_EGM: Matrices,
    bias_EG: Tensor | None,
    routes: Routes,
    gate: str,
    plan: Rows | Tiles | Widened | None = None,
) -> Tensor:
    """Compute `op.grouped_gate_up`. plan: another cut than the one that would be chosen, for tests and tuning."""
    if _needs_gradient(x_TM, weight_EGM, bias_EG):
        return torch_ops.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    if gate in UNGATED:
        y_PF = _up(x_TM, weight_EGM, bias_EG, routes, plan)
        return y_PF if gate == PRODUCTS else activation(y_PF, gate)
    (tokens, used), (experts, height, width) = routes.expert_TK.shape, shape_of(weight_EGM)
    x_TM = x_TM if x_TM.stride(1) == 1 else x_TM.contiguous()
    if isinstance(weight_EGM, Tensor):
        own = plan or choose_gate_up(
            tokens, width, height // 2, experts=experts, used=used, itemsize=x_TM.itemsize,
            shared=shared_memory(x_TM.device),
        )  # fmt: skip
        if isinstance(own, Rows):
            return _gate_up_rows(own, x_TM, weight_EGM.contiguous(), bias_EG, routes, gate)
        assert isinstance(own, Tiles)
        return _plain_products(own, x_TM, weight_EGM, bias_EG, routes, gate, on_hopper=plan is None)
    hopper = None if plan else _quantized_on_hopper(x_TM, weight_EGM, routes, gated=True)
    if hopper is not None:
        return hopper.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    how = plan or _quantized_plan(x_TM, weight_EGM, routes, 2)
    if isinstance(how, Rows):
        return quantized.gate_up_rows(how, x_TM, weight_EGM, bias_EG, routes, gate)
    return _quantized_products(how, x_TM, weight_EGM, bias_EG, routes, gate, on_hopper=plan is None)


def _up(
    x_TM: Tensor, weight_EFM: Matrices, bias_EF: Tensor | None, routes: Routes, plan: Rows | Tiles | Widened | None
) -> Tensor:
    """Return every pair's product with its own expert's one matrix, by the kernels that multiply a row for each pair:
    [P, F]."""
    x_PM = x_TM.index_select(0, routes.token_P)
    if isinstance(weight_EFM, Tensor):
        (tokens, used), experts = routes.expert_TK.shape, len(weight_EFM)
        own = plan or choose_tiles(
            tokens, experts=experts, used=used, itemsize=x_TM.itemsize, shared=shared_memory(x_TM.device)
        )
        assert isinstance(own, Tiles)
        return _plain_products(own, x_PM, weight_EFM, bias_EF, routes, None, on_hopper=plan is None)
    hopper = None if plan else _quantized_on_hopper(x_PM, weight_EFM, routes, gated=False)
    if hopper is not None and isinstance(weight_EFM, Packed):  # which no portable kernel reads
        return hopper.products(x_PM, weight_EFM, bias_EF, routes, "")
    how = plan or _quantized_plan(x_PM, weight_EFM, routes, 1)
    how = FIXED if isinstance(how, Rows) else how
    return _quantized_products(how, x_PM, weight_EFM, bias_EF, routes, None, on_hopper=plan is None)


def grouped_down(
    h_PF: Tensor,
    weight_EMF: Matrices,
    bias_EM: Tensor | None,
    routes: Routes,
    add_TM: Tensor | None,
    plan: Rows | Tiles | Widened | None = None,
) -> Tensor:
    """Compute `op.grouped_down`. plan: another cut than the one that would be chosen, for tests and tuning."""
    if _needs_gradient(h_PF, weight_EMF, bias_EM, add_TM, routes.weight_TK):
        return torch_ops.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
    (tokens, used), (experts, width, inner) = routes.expert_TK.shape, shape_of(weight_EMF)
    h_PF = h_PF.contiguous()
    add_TM = add_TM if add_TM is None or add_TM.stride(1) == 1 else add_TM.contiguous()
    if isinstance(weight_EMF, Tensor):
        if plan is None and (few := _few_on_hopper(h_PF, weight_EMF, routes)) is not None:
            return few.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
        own = plan or choose_down(
            tokens, inner, width, experts=experts, used=used, itemsize=h_PF.itemsize,
            shared=shared_memory(h_PF.device),
        )  # fmt: skip
        if isinstance(own, Rows):
            return _down_rows(own, h_PF, weight_EMF.contiguous(), bias_EM, routes, add_TM)
        assert isinstance(own, Tiles)
        y_PM = _plain_products(own, h_PF, weight_EMF, bias_EM, routes, None, on_hopper=plan is None)
        return combine(y_PM, routes, add_TM, experts)
    hopper = None if plan else _quantized_on_hopper(h_PF, weight_EMF, routes, gated=False)
    if hopper is not None:
        return hopper.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
    how = plan or _quantized_plan(h_PF, weight_EMF, routes, triton.next_power_of_2(used))
    if isinstance(how, Rows):
        return quantized.down_rows(how, h_PF, weight_EMF, bias_EM, routes, add_TM)
    y_PM = _quantized_products(how, h_PF, weight_EMF, bias_EM, routes, None, on_hopper=plan is None)
    return combine(y_PM, routes, add_TM, experts)


def _plain_products(
    plan: Tiles, x: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str | None,
    y_PO: Tensor | None = None, *, on_hopper: bool,
) -> Tensor:  # fmt: skip
    """Return the products of `launch_tiles`, by the kernels of hopper.py where they can run."""
    hopper = _hopper(x.device) if on_hopper else None
    if hopper is not None and hopper.supports(x, weight_EOI):
        return hopper.products(x, weight_EOI, bias_EO, routes, gate or "", y_PO=y_PO)
    return launch_tiles(plan, x, weight_EOI.contiguous(), bias_EO, routes, gate, y_PO)


def _quantized_on_hopper(x: Tensor, weight: Quantized, routes: Routes, *, gated: bool) -> Any:
    """Return hopper.py where it multiplies these matrices, else None.

    Of MXFP4 and levels it makes operands anew for every 128 or 64 pairs, so for many pairs matrices that are widened in
    memory are faster. Beside FP8 it rounds activations in one launch more, which for one or two tokens costs more than
    rows of the experts' first product do (9.6 against 12.3 µs for one token of Qwen3-30B-A3B; the second: 12.1 against
    9.7).
    """
    hopper = _hopper(x.device) if matrices.ON_HOPPER else None
    if hopper is None or not hopper.supports(x, weight, gated=gated):
        return None
    if is_mxfp8(weight) and not matrices.MXFP8_ON_HOPPER:
        return None
    if isinstance(weight, Packed) or (is_mxfp8(weight) and len(routes.expert_TK) > FP8_ROWS):
        return None if len(routes.token_P) > WIDENED * shape_of(weight)[0] else hopper
    return None if gated and len(routes.expert_TK) <= FP8_ROWS else hopper


def _quantized_plan(x: Tensor, weight: Quantized, routes: Routes, together: int) -> Rows | Tiles | Widened:
    form, (tokens, used), (experts, outputs, inputs) = form_of(weight), routes.expert_TK.shape, shape_of(weight)
    if form is None:  # no kernel reads it
        return Widened()
    return choose_quantized(
        tokens, inputs, outputs, together=together, experts=experts, used=used, per_byte=form.per_byte,
        itemsize=x.itemsize,
    )  # fmt: skip


def _quantized_products(
    plan: Tiles | Widened, x: Tensor, weight: Quantized, bias_EO: Tensor | None, routes: Routes, gate: str | None,
    *, on_hopper: bool,
) -> Tensor:  # fmt: skip
    """Return every pair's product with matrices in FP8 or codes, as `launch_tiles` does.

    on_hopper: the kernels of hopper.py multiply what is widened where they can run.
    """
    if isinstance(plan, Tiles) and form_of(weight) is not None:
        return launch_tiles(plan, x, weight, bias_EO, routes, gate)
    tokens, used = routes.expert_TK.shape
    own = plan if isinstance(plan, Tiles) else choose_tiles(
        tokens, experts=shape_of(weight)[0], used=used, itemsize=x.itemsize, shared=shared_memory(x.device)
    )  # fmt: skip
    y_PO = None
    for plain, biases, some in quantized.widened(weight, bias_EO, routes, x.dtype):
        y_PO = _plain_products(own, x, plain, biases, some, gate, y_PO, on_hopper=plan is not own)
    assert y_PO is not None
    return y_PO


def launch_tiles(
    plan: Tiles, x: Tensor, weight: Matrices, bias_EO: Tensor | None, routes: Routes, gate: str | None,
    y_PO: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return every pair's product [P, O] with its own expert. With a gate x has a row for each token, and the result
    is act(first half) * second half. Without one x has a row for each pair.

    y_PO: where products are written, if some experts' are there already.
    """
    experts, height, inputs = shape_of(weight)
    form = None if isinstance(weight, Tensor) else form_of(weight)
    stored = (weight, x, x, x) if isinstance(weight, Tensor) else tensors(weight)
    outputs, pairs = height // 2 if gate else height, len(routes.token_P)
    if y_PO is None:
        y_PO = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = torch.float32 if INTERPRETED and x.dtype == torch.bfloat16 else x.dtype
    columns = plan.rows // 2 if gate else plan.rows
    grouped_tiles_kernel[(triton.cdiv(outputs, columns), row_tiles(pairs, experts, plan.tokens))](
        x, *stored, x if bias_EO is None else bias_EO, y_PO, routes.token_P, routes.start_E1, x.stride(0),
        I=inputs, O=outputs, E=experts, EXPERTS=triton.next_power_of_2(experts), ROWS=plan.rows, TOKENS=plan.tokens,
        BLOCK=plan.block, STAGES=plan.stages, DOT=_DTYPES[operands], GATHER=gate is not None,
        BIAS=bias_EO is not None, GATE=gate or "", **(PLAIN if form is None else form.constants()),
        num_warps=plan.warps, **launch_options(x.device),
    )  # fmt: skip
    return y_PO


def _gate_up_rows(
    plan: Rows, x_TM: Tensor, weight_EGM: Tensor, bias_EG: Tensor | None, routes: Routes, gate: str
) -> Tensor:
    experts, height, width = weight_EGM.shape
    inner, pairs = height // 2, len(routes.token_P)
    y_PF = torch.empty(pairs, inner, dtype=x_TM.dtype, device=x_TM.device)
    gate_up_rows_kernel[(triton.cdiv(inner, plan.rows), pairs)](
        x_TM, weight_EGM, x_TM if bias_EG is None else bias_EG, routes.expert_TK, routes.place_TK, y_PF,
        x_TM.stride(0), M=width, F=inner, E=experts, K=routes.expert_TK.shape[1], ROWS=plan.rows, BLOCK=plan.block,
        BIAS=bias_EG is not None, GATE=gate, num_warps=plan.warps, **launch_options(x_TM.device),
    )  # fmt: skip
    return y_PF


def _down_rows(
    plan: Rows, h_PF: Tensor, weight_EMF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    (tokens, used), (experts, width, inner) = routes.expert_TK.shape, weight_EMF.shape
    y_TM = torch.empty(tokens, width, dtype=h_PF.dtype, device=h_PF.device)
    add = h_PF if add_TM is None else add_TM
    down_rows_kernel[(triton.cdiv(width, plan.rows), tokens)](
        h_PF, weight_EMF, h_PF if bias_EM is None else bias_EM, routes.expert_TK, routes.weight_TK, routes.place_TK,
        add, y_TM, add.stride(0), F=inner, M=width, E=experts, K=used, CHOICES=triton.next_power_of_2(used),
        ROWS=plan.rows, BLOCK=plan.block, BIAS=bias_EM is not None, ADD=add_TM is not None, num_warps=plan.warps,
        **launch_options(h_PF.device),
    )  # fmt: skip
    return y_TM


def _few_on_hopper(h_PF: Tensor, weight_EMF: Tensor, routes: Routes) -> Any:
    """Return hopper_rows.py where it multiplies so few tokens' rows, else None."""
    tokens, used = routes.expert_TK.shape
    plan = choose_shared(tokens, h_PF.shape[1], used, h_PF.itemsize)
    fits = plan is not None and h_PF.dtype == weight_EMF.dtype and weight_EMF.is_contiguous()
    return _hopper(h_PF.device, "hopper_rows") if fits else None


@cache
def _hopper(device: torch.device, module: str = "hopper") -> Any:
    """Return hopper.py, or another module for it, on a Hopper GPU, else None. They are Gluon, which is imported only
    where it runs."""
    name = f"ridgeline.kernels.gemm.experts.{module}"
    return importlib.import_module(name) if compute_capability(device) == (9, 0) and find_spec(name) else None


def _needs_gradient(*tensors: Matrices | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
