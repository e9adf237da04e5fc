"""Linear maps on a CPU whose weights were brought, once, into the layout that oneDNN reads fastest.

F.linear, which a weight goes through as it was loaded, would bring it there anew, piece by piece, every time.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.torch_ops import gated_activation
from ridgeline.kernels.gemm.op import in_three
from ridgeline.kernels.norm.torch_ops import rms_norm
from ridgeline.kernels.onednn import in_large_pages


def pack(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's layout; as it is where the machine has no instructions for its dtype. float32 gains little
    and stays too. What is packed has no gradients."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if weight_OI.dtype not in supported or not supported[weight_OI.dtype]():
        return weight_OI
    return in_large_pages(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None))


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """As `op.linear`; the weight is a plain or a packed one. Differentiable with a plain one."""
    if weight_OI.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return F.linear(x_TI, weight_OI, bias_O)


norm_linear = in_three(rms_norm, linear, gated_activation)
