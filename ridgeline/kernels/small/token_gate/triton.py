"""The product and the gate in one kernel: a program for each token, which adds up in the same order whatever tokens are
beside it. The legend is that of op.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.token_gate import torch_ops

BLOCK = 1024


@triton.jit
def _token_gate(
    y_ptr, n_ptr, weight_ptr, out_ptr, y_stride, n_stride, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, M, BLOCK):
        mask = begin + column < M
        n = tl.load(n_ptr + row * n_stride + begin + column, mask=mask, other=0).to(tl.float32)
        products += n * tl.load(weight_ptr + begin + column, mask=mask, other=0).to(tl.float32)
    gate = tl.sigmoid(tl.sum(products, 0))
    for begin in tl.static_range(0, M, BLOCK):
        mask = begin + column < M
        y = tl.load(y_ptr + row * y_stride + begin + column, mask=mask, other=0)
        tl.store(out_ptr + row * M + begin + column, (y.to(tl.float32) * gate).to(y.dtype), mask=mask)


def token_gate(y_TM: Tensor, n_TM: Tensor, weight_1M: Tensor) -> Tensor:
    """Compute `op.token_gate`. If a gradient is wanted, torch's own kernels run, since this has none."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (y_TM, n_TM, weight_1M)):
        return torch_ops.token_gate(y_TM, n_TM, weight_1M)
    tokens, width = y_TM.shape
    out_TM = torch.empty(tokens, width, dtype=y_TM.dtype, device=y_TM.device)
    _token_gate[(tokens,)](
        y_TM, n_TM, weight_1M, out_TM, y_TM.stride(0), n_TM.stride(0), M=width,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=4, **launch_options(y_TM.device),
    )  # fmt: skip
    return out_TM


def _aot(width: int) -> AotKernel:
    signature = {f"{name}_ptr": "*bf16" for name in ("y", "n", "weight", "out")}
    signature |= {"y_stride": "i32:16", "n_stride": "i32:16"}
    return AotKernel(_token_gate, signature, {"M": width, "BLOCK": BLOCK}, num_warps=4, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(2048),)
