"""The order of pairs whose experts are known, in one launch. The legend is that of op.py.

A program has an expert. It counts the pairs of the experts before, which is where its own begin, and then writes its
own in their order. Each program reads the experts of all pairs twice, which the caches hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.gemm.route.op import Routes

LEAST, MOST = 256, 8192  # pairs that a program looks at together
EACH = 16  # pairs of a thread, at most


@triton.jit(do_not_specialize=["pairs"])
def order_pairs_kernel(
    expert_ptr, token_ptr, place_ptr, start_ptr, pairs, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write the places and tokens of one expert's pairs, and where they begin. The last program has those with none."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, so that later kernels may read the routes
    expert, at_B = tl.program_id(0), tl.arange(0, BLOCK)
    less_B = at_B * 0
    for first in range(0, pairs, BLOCK):
        expert_B = tl.load(expert_ptr + first + at_B, mask=first + at_B < pairs, other=expert)
        less_B += (expert_B < expert).to(tl.int32)
    place = tl.sum(less_B, 0)
    tl.store(start_ptr + expert, place)
    for first in range(0, pairs, BLOCK):
        pair_B = first + at_B
        here_B = (tl.load(expert_ptr + pair_B, mask=pair_B < pairs, other=-1) == expert).to(tl.int32)
        place_B = place + tl.cumsum(here_B, 0) - 1
        tl.store(place_ptr + pair_B, place_B, mask=here_B > 0)
        tl.store(token_ptr + place_B, pair_B // K, mask=here_B > 0)
        place += tl.sum(here_B, 0)


def ordered(expert_TK: Tensor, weight_TK: Tensor, count: int) -> Routes:
    """Compute `op.without_waiting`."""
    expert_TK = expert_TK.int().contiguous()
    pairs, place_TK = expert_TK.numel(), torch.empty_like(expert_TK)
    token_P, start_E1 = expert_TK.new_empty(pairs), expert_TK.new_empty(count + 1)
    block = max(LEAST, min(MOST, triton.next_power_of_2(max(1, pairs))))
    order_pairs_kernel[(count + 1,)](
        expert_TK, token_P, place_TK, start_E1, pairs, K=max(1, expert_TK.shape[1]), BLOCK=block,
        num_warps=max(4, min(16, block // (32 * EACH))), **launch_options(expert_TK.device),
    )  # fmt: skip
    return Routes(expert_TK, weight_TK, token_P, place_TK, start_E1)


_SIGNATURE = dict.fromkeys(("expert_ptr", "token_ptr", "place_ptr", "start_ptr"), "*i32") | {"pairs": "i32"}
AOT = (
    AotKernel(order_pairs_kernel, _SIGNATURE, {"K": 8, "BLOCK": LEAST}, num_warps=4, hot=True, archs=ONE_OF_EACH),
    AotKernel(order_pairs_kernel, _SIGNATURE, {"K": 8, "BLOCK": MOST}, num_warps=16, hot=True, archs=("sm_90",)),
)
