"""Linear maps of weights in codes on a GPU. If NVIDIA's matrix units take the codes from fragments, up to about two
hundred tokens (on Hopper a thousand) are multiplied from there; otherwise the weight is dequantized and `linear`
multiplies.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability, num_multiprocessors
from ridgeline.kernels.gemm.codes.choose import FRAGMENT_TOKENS, WIDE_TOKENS, Cut, Wide, choose, choose_wide
from ridgeline.kernels.gemm.codes.dequantize import dequantize
from ridgeline.kernels.gemm.codes.fragments import TILE, Fragments, arranged, fits, span, unit
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.places import norm_in_places
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand, in_three
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm


def coded_linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    """Compute `op.coded_linear`."""
    x_TI = ordered(x_TI, weight)
    y_TO = from_fragments(x_TI, weight, bias_O, None)
    if y_TO is not None:
        return y_TO
    # by the library: our products ask for their weight before the kernel in front, which writes this one, has ended
    return F.linear(x_TI, dequantize(weight, x_TI.dtype), bias_O)


def coded_norm_linear(x: Operand, weight: Coded, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `op.coded_norm_linear`. In float16 the norm has a kernel of its own: what it scales could overflow."""
    (x_TI, residual_TI, norm_weight_I, eps), (bias_O, gate, *_) = x, epilogue
    if norm_weight_I is None:
        return _in_three(x, weight, epilogue)
    cut = cut_of(x_TI, weight, gate)
    packed = x_TI.stride(-1) == 1 and (residual_TI is None or residual_TI.is_contiguous())
    if cut is not None and cut.solo and packed and weight.order_I is None and x_TI.dtype == torch.bfloat16:
        return launch_cut(cut, x, weight, epilogue)
    plan = wide_cut_of(x_TI, weight, gate)
    if plan is not None and packed and weight.order_I is None:
        n_TI, s_TI = norm_in_places(x_TI, residual_TI, norm_weight_I, eps, span(weight.format))
        return launch_wide(plan, n_TI, weight, bias_O, gate, placed=True), s_TI
    n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = from_fragments(ordered(n_TI, weight), weight, bias_O, gate)
    return _in_three(Operand(n_TI), weight, epilogue)[0] if y_TO is None else y_TO, s_TI


_in_three = in_three(rms_norm, coded_linear, gated_activation)


def prepared(weight: Coded, dtype: torch.dtype) -> Coded:
    """Return the weight as these ops multiply it fastest."""
    matrix_units = compute_capability(weight.code_OB.device) >= (8, 0) and dtype.itemsize == 2
    return arranged(weight) if matrix_units and fits(weight) and not isinstance(weight, Fragments) else weight


def ordered(x_TI: Tensor, weight: Coded) -> Tensor:
    """Return x with its columns in the order of the codes."""
    if weight.order_I is not None:
        return x_TI.index_select(1, weight.order_I)
    return x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()


def from_fragments(
    x_TI: Tensor, weight: Coded, bias_O: Tensor | None, gate: str | None, same: bool = False
) -> Tensor | None:
    """Return the product, gated if there is a gate; None if the weight is not in fragments, or there are too many
    tokens. x's columns are in the order of the codes.

    same: all tokens' sums are in the same order, however many tokens there are.
    """
    plan = None if same else wide_cut_of(x_TI, weight, gate)
    if plan is not None:
        return launch_wide(plan, x_TI, weight, bias_O, gate)
    cut = cut_of(x_TI, weight, gate, same)
    return None if cut is None else launch_cut(cut, Operand(x_TI), weight, Epilogue(bias_O, gate))[0]


def cut_of(x_TI: Tensor, weight: Coded, gate: str | None, same: bool = False) -> Cut | None:
    """Return the cut of the kernel for fragments, or None if it does not apply."""
    how, parts = weight.format, 2 if gate else 1
    tiles, rest = divmod(weight.code_OB.shape[0], TILE * parts)
    if (
        not isinstance(weight, Fragments)
        or x_TI.itemsize != 2
        or rest
        or not 0 < len(x_TI) <= (len(x_TI) if same else FRAGMENT_TOKENS)
    ):
        return None
    return choose(
        len(x_TI), tiles, weight.inputs // unit(how), words=unit(how) * how.bits // 64, parts=parts,
        processors=num_multiprocessors(x_TI.device), same=same,
    )  # fmt: skip


def wide_cut_of(x_TI: Tensor, weight: Coded, gate: str | None) -> Wide | None:
    """Return the cut of the kernel for warpgroups, or None if it does not apply."""
    how, tokens = weight.format, len(x_TI)
    known = isinstance(weight, Fragments) and x_TI.itemsize == 2
    if not known or tokens not in WIDE_TOKENS or compute_capability(x_TI.device) != (9, 0):
        return None
    outputs, rest = divmod(weight.code_OB.shape[0], 2 if gate else 1)
    return None if rest else choose_wide(
        tokens, outputs, weight.inputs // unit(how), unit=unit(how), bits=how.bits, gated=gate is not None,
        processors=num_multiprocessors(x_TI.device),
    )  # fmt: skip


def launch_wide(
    plan: Wide, x_TI: Tensor, weight: Coded, bias_O: Tensor | None, gate: str | None, placed: bool = False
) -> Tensor:
    from ridgeline.kernels.gemm.codes import wide  # Gluon, which is imported only where it runs

    assert isinstance(weight, Fragments)
    return wide.launch(plan, x_TI, weight, bias_O, gate, placed)


def launch_cut(cut: Cut, x: Operand, weight: Coded, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.gemm.codes import fragments_kernel  # Gluon, which is imported only where it runs

    assert isinstance(weight, Fragments)
    return fragments_kernel.launch(cut, x, weight, epilogue)
