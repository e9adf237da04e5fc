"""Linear maps of 8-bit weights on a GPU, for the ops of gemm/fp8 and gemm/int8: which kernels run, one after the other.

No gradient passes.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability, num_multiprocessors
from ridgeline.kernels.base.tuned import GpuKind, remembered, tuned
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.fp8 import library
from ridgeline.kernels.gemm.fp8.choose import (
    FIXED,
    Tile,
    Tiles,
    choose_hopper,
    choose_tile,
    class_of,
    library_wins,
    rounded_before,
)
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.rounding import round_into, round_rows
from ridgeline.kernels.gemm.fp8.tiles import launch_tiles
from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand, in_three
from ridgeline.kernels.gemm.plain.predict import ProductShape
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm


def linear(x: Tensor | Rounded, weight: Eight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of x. Activations are rounded on Hopper, if they are not yet."""
    if isinstance(x, Rounded):
        if takes_rounded(weight, len(x.q_TI), x.dtype):
            return rounded_linear(x, weight, bias_O, None)
        x = x.wide().to(x.dtype)
    return norm_linear(Operand(x), weight, Epilogue(bias_O))[0]


def norm_linear(x: Operand, weight: Eight, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Return (y, s) as the op `fp8_norm_linear` does."""
    x = x if x.x_TI.stride(1) == 1 else x._replace(x_TI=x.x_TI.contiguous())
    if not len(x.x_TI) or not _on_matrix_units(weight, x.x_TI.dtype):
        return _in_three(x, weight, epilogue)
    assert weight.activations is not None
    rounded, s_TI = round_rows(x, weight.number_OI.dtype, weight.activations, weight.x_scale)
    return rounded_linear(rounded, weight, epilogue.bias_O, epilogue.gate, buffer=epilogue.buffer), s_TI


def _unrounded(x_TI: Tensor, weight: Eight, bias_O: Tensor | None) -> Tensor:
    return launch_tiles(choose_tile(len(x_TI), len(weight.number_OI)), x_TI, weight, bias_O)


def _in_buffer(y_TO: Tensor, buffer: Rounded | None) -> Tensor:
    if buffer is None:
        return y_TO
    round_into(y_TO, buffer)
    return buffer.q_TI


_in_three = in_three(rms_norm, _unrounded, gated_activation, _in_buffer)


def rounded_linear(
    x: Rounded,
    weight: Eight,
    bias_O: Tensor | None,
    gate: str | None,
    plan: Stream | Tiles | None = None,
    buffer: Rounded | None = None,
) -> Tensor:
    """Return the product of rounded activations, gated if there is a gate, on Hopper. With `buffer` the result is
    rounded into it: by the same kernel if a program has all outputs of a scale."""
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // (2 if gate else 1)
    if gate and weight.blocked and outputs % BLOCK:  # a block of scales would have gates and ups
        return _in_buffer(gated_activation(rounded_linear(x, weight, bias_O, None), gate), buffer)
    if plan is None:
        gated = gate is not None
        between = buffer is not None or (x.grouped and not weight.blocked)
        if not x.grouped and library.has(weight, x.dtype) and library_wins(tokens, inputs, gated=gated):
            return _in_buffer(library.product(x, weight, bias_O), buffer)
        plan = _chosen(ProductShape(tokens, inputs, outputs, gated, 1), weight, device, between=between)
    from ridgeline.kernels.gemm.fp8 import hopper  # Gluon, which is imported only where it runs

    if isinstance(plan, Tiles):
        return _in_buffer(hopper.launch_tiles(plan, x, weight, bias_O, gate), buffer)
    if plan.rows == BLOCK and outputs % BLOCK == 0:
        return hopper.launch_stream(plan, x, weight, bias_O, gate, buffer)
    return _in_buffer(hopper.launch_stream(plan, x, weight, bias_O, gate), buffer)


def _chosen(of: ProductShape, weight: Eight, device: torch.device, *, between: bool) -> Stream | Tiles:
    """Return the cut that was the fastest on this kind of GPU, or else the one that the rule gives."""
    gpu = GpuKind(compute_capability(device), num_multiprocessors(device))
    return _cut_of(of, gpu, weight.blocked, between, weight.number_OI.dtype == torch.float8_e4m3fn)


@remembered
def _cut_of(of: ProductShape, gpu: GpuKind, blocked: bool, between: bool, is_e4m3: bool) -> Stream | Tiles:
    shape = class_of(of, blocked=blocked, between=between)
    plan: Stream | Tiles | None = (
        tuned("fp8_norm_linear" if of.gated else "fp8_linear", shape, gpu, Stream, Tiles) if is_e4m3 else None
    )
    return plan or choose_hopper(
        of.tokens, of.inputs, of.outputs, gated=of.gated, processors=gpu.processors, blocked=blocked, between=between
    )  # fmt: skip


def takes_rounded(weight: Eight, tokens: int, dtype: torch.dtype) -> bool:
    """Return True if activations of `dtype` are best rounded by the op before, with a scale for each 128 inputs."""
    inputs = weight.number_OI.shape[1]
    right = weight.number_OI.dtype == torch.float8_e4m3fn and weight.activations in ("token", "block")
    return right and rounded_before(tokens, inputs) and _on_matrix_units(weight, dtype)


def rounds_gated(weight: Eight, tokens: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel of a gated product rounds its own results: if a program has all outputs of a scale."""
    if not tokens or not _on_matrix_units(weight, dtype):
        return False
    outputs, inputs = len(weight.number_OI) // 2, weight.number_OI.shape[1]
    plan = _chosen(ProductShape(tokens, inputs, outputs, True, 1), weight, weight.number_OI.device, between=True)
    return isinstance(plan, Stream) and plan.rows == BLOCK and outputs % BLOCK == 0


def invariant_linear(x_TI: Tensor, weight: Eight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, with the same bits for a token whatever tokens stand beside it."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    tile = Tile(FIXED.rows, FIXED.tokens, 64) if x_TI.dtype == torch.float32 else FIXED
    return launch_tiles(tile, x_TI, weight, bias_O)


def _on_matrix_units(weight: Eight, dtype: torch.dtype) -> bool:
    """Return True if 8-bit products can run: on Hopper, with results of 16 bits, whose rows bulk copies can read."""
    outputs, inputs = weight.number_OI.shape
    shaped = inputs % 16 == outputs % 16 == 0 and inputs >= 256
    rounds = weight.activations is not None and dtype.itemsize == 2
    hopper = compute_capability(weight.number_OI.device) == (9, 0)
    return rounds and shaped and weight.number_OI.data_ptr() % 16 == 0 and hopper
