"""Linear maps on a GPU: kernels of our own for up to a few hundred tokens, at the memory's rate, and the library for
more.

If a gradient is wanted, torch's own kernels run, since these have none.

Legend:
    T  tokens
    I  inputs
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.counters import counters
from ridgeline.kernels.base.launch import (
    INTERPRETED,
    compute_capability,
    launch_options,
    num_multiprocessors,
    shared_memory,
)
from ridgeline.kernels.base.tuned import GpuKind, remembered, tuned
from ridgeline.kernels.gemm.lora.triton import lora
from ridgeline.kernels.gemm.plain import beside, torch_ops
from ridgeline.kernels.gemm.plain.choose import STREAM_TOKENS, LibraryProduct, RowsPlan, Stream, Tiles, choose, fits
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.predict import ProductShape, class_of
from ridgeline.kernels.gemm.plain.rows import NO_ADAPTERS, laps_kernel, rows_kernel
from ridgeline.kernels.gemm.plain.tiles import tiles_kernel
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `op.linear`."""
    plan = _plan(x_TI, weight_OI)
    if (
        plan is None
        or isinstance(plan, LibraryProduct)
        or not _packed(x_TI)
        or _needs_gradient(x_TI, weight_OI, bias_O)
    ):
        return by_library(x_TI, weight_OI, bias_O)
    if isinstance(plan, RowsPlan):
        return launch_rows(plan, Operand(x_TI), weight_OI, Epilogue(bias_O))[0]
    return _launch(plan, x_TI, weight_OI, bias_O, None)


def by_library(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return `op.linear` by torch's own product."""
    if x_TI.is_meta:  # torch would take seconds to import what finds the shape of a product with a bias
        return x_TI.new_empty(*x_TI.shape[:-1], len(weight_OI))
    return F.linear(x_TI, weight_OI, bias_O)


def norm_linear(x: Operand, weight: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `op.norm_linear`."""
    bias_O, gate, _, adapters = epilogue
    if _needs_gradient(x.x_TI, x.residual_TI, x.norm_weight_I, weight, bias_O):
        assert adapters is None  # training has adapters of its own
        return torch_ops.norm_linear(x, weight, epilogue)
    if x.norm_weight_I is None and x.residual_TI is not None:
        x = Operand(x.summed())
    plan = _plan(
        x.x_TI, weight, norm=x.norm_weight_I is not None, gated=gate is not None, adapters=adapters is not None
    )
    if isinstance(plan, RowsPlan) and _packed(x.x_TI) and _packed(x.residual_TI):
        return launch_rows(plan, x, weight, epilogue)
    n_TI = s_TI = x.x_TI
    if adapters is not None and isinstance(plan, Stream) and _packed(n_TI) and _packed(x.residual_TI):
        return _beside(plan, x, weight, epilogue)
    if x.norm_weight_I is not None:
        n_TI, s_TI = rms_norm(x.x_TI, x.residual_TI, x.norm_weight_I, x.eps)
    if isinstance(plan, Tiles | Stream) and _packed(n_TI) and adapters is None:
        return _launch(plan, n_TI, weight, bias_O, gate), s_TI
    y_TO = (by_library if isinstance(plan, LibraryProduct) else linear)(n_TI, weight, bias_O)
    if adapters is not None:
        lora(y_TO, n_TI, *adapters)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI


def _plan(
    x_TI: Tensor, weight_OI: Tensor, *, norm: bool = False, gated: bool = False, adapters: bool = False
) -> RowsPlan | Tiles | Stream | LibraryProduct | None:
    (outputs, inputs), device = weight_OI.shape, x_TI.device
    hopper = _hopper(device) if _copyable(x_TI) and _copyable(weight_OI) else 0
    tokens = min(x_TI.shape[0], STREAM_TOKENS + 1)  # more are alike
    of = ProductShape(tokens, inputs, outputs // 2 if gated else outputs, gated, x_TI.itemsize)
    return _cut_of(of, shared_memory(device), hopper, norm, adapters)


@remembered
def _cut_of(
    of: ProductShape, shared: int, hopper: int, norm: bool, adapters: bool
) -> RowsPlan | Tiles | Stream | LibraryProduct | None:
    """Return the cut that was the fastest on this kind of GPU, or else the one that the rule gives."""
    if hopper and not adapters and of.tokens <= STREAM_TOKENS and of.itemsize == 2:
        name = "norm_linear" if norm or of.gated else "linear"
        shape, right = class_of(of, norm=norm), partial(fits, tokens=of.tokens, inputs=of.inputs, gated=of.gated)
        known: RowsPlan | Stream | LibraryProduct | None = tuned(
            name, shape, GpuKind((9, 0), hopper), RowsPlan, Stream, LibraryProduct, fits=right
        )
        if known is not None:
            return known
    return choose(
        of.tokens, of.inputs, of.outputs, itemsize=of.itemsize, shared=shared, norm=norm, gated=of.gated,
        hopper=hopper, adapters=adapters,
    )  # fmt: skip


def _beside(plan: Stream, x: Operand, weight_OI: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `norm_linear` with products of adapters."""
    from ridgeline.kernels.gemm.plain.hopper_beside import launch_beside  # Gluon, which is imported only where it runs

    n_TI = s_TI = x.x_TI
    if x.norm_weight_I is not None:
        n_TI, s_TI = rms_norm(x.x_TI, x.residual_TI, x.norm_weight_I, x.eps)
    return launch_beside(plan, n_TI, weight_OI, epilogue), s_TI


def _launch(plan: Tiles | Stream, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gate: str | None) -> Tensor:
    if isinstance(plan, Tiles):
        return launch_tiles(plan, x_TI, weight_OI, bias_O, gate)
    from ridgeline.kernels.gemm.plain.hopper import launch_stream  # likewise

    return launch_stream(plan, x_TI, weight_OI, bias_O, gate)


def launch_rows(plan: RowsPlan, x: Operand, weight_OI: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Return (y, s) as `norm_linear` does. Without a norm nothing is added, and s is x."""
    (x_TI, residual_TI, norm_weight_I, eps), (bias_O, gate, _, adapters) = x, epilogue
    added = NO_ADAPTERS if adapters is None else beside.for_rows(x, adapters)
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI) // 2 if gate else len(weight_OI)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=x_TI.device)
    # In place of an absent tensor any pointer will do: the kernel reads only what its flags say
    residual = x_TI if residual_TI is None else residual_TI
    tiles = triton.cdiv(outputs, plan.rows)
    laps = plan.programs > 0
    assert plan.block >= inputs or not laps
    programs = min(plan.programs * num_multiprocessors(x_TI.device), tiles) if laps else tiles
    (laps_kernel if laps else rows_kernel)[(programs,)](
        x_TI, residual, x_TI if norm_weight_I is None else norm_weight_I, weight_OI.contiguous(),
        x_TI if bias_O is None else bias_O, y_TO, s_TI, x_TI.stride(0), residual.stride(0), tokens, outputs, eps,
        inputs=inputs, ROWS=plan.rows, TOKENS=plan.tokens, FULL=tokens == plan.tokens, BLOCK=plan.block,
        NORM=norm_weight_I is not None, RESIDUAL=residual_TI is not None, BIAS=bias_O is not None, GATE=gate or "",
        num_warps=plan.warps, **added, **({} if laps else {"DEPTH": plan.depth}), **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO, s_TI


def launch_tiles(plan: Tiles, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half: [T, F]."""
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI) // 2 if gate else len(weight_OI)
    tiles = triton.cdiv(outputs, plan.rows // 2 if gate else plan.rows)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    parts, arrivals = x_TI, x_TI
    if plan.split > 1:
        parts = torch.empty(tiles * plan.split * plan.rows * plan.tokens, dtype=torch.float32, device=x_TI.device)
        arrivals = counters(x_TI.device, tiles)
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = torch.float32 if INTERPRETED and x_TI.dtype == torch.bfloat16 else x_TI.dtype
    tiles_kernel[(tiles, plan.split)](
        x_TI, weight_OI.contiguous(), x_TI if bias_O is None else bias_O, y_TO, parts, arrivals, x_TI.stride(0),
        tokens, outputs, inputs, ROWS=plan.rows, TOKENS=plan.tokens, BLOCK=plan.block, STAGES=plan.stages,
        SPLIT=plan.split, AHEAD=plan.ahead, WHOLE=inputs % (plan.block * plan.split) == 0, DOT=_DTYPES[operands],
        BIAS=bias_O is not None, GATE=gate or "", num_warps=plan.warps, **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _packed(x_TI: Tensor | None) -> bool:
    return x_TI is None or x_TI.stride(-1) == 1


def _copyable(x: Tensor) -> bool:
    """Return True if bulk copies can read the matrix: its rows are contiguous and begin at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def _hopper(device: torch.device) -> int:
    """Return the multiprocessors of a Hopper GPU, and 0 for any other device."""
    return num_multiprocessors(device) if compute_capability(device) == (9, 0) else 0
