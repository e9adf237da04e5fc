"""Linear maps on a CPU whose weights were packed, once, in the layout that oneDNN reads fastest.

F.linear, which serves weights that are not packed, would reorder them anew, piece by piece, in every call.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.onednn import in_large_pages
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm


def pack(weight_OI: Tensor) -> Tensor:
    """Return the weight in oneDNN's layout, which has no gradients. The weight stays as it is if the machine has no
    instructions for its dtype, and in float32, which gains little."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if weight_OI.dtype not in supported or not supported[weight_OI.dtype]():
        return weight_OI
    return in_large_pages(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None))


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `op.linear` with a plain or a packed weight. It is differentiable with a plain one."""
    if weight_OI.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return F.linear(x_TI, weight_OI, bias_O)


norm_linear = in_three(rms_norm, linear, gated_activation)
