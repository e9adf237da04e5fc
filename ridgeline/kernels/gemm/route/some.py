"""The routes of a rank's own experts in one launch. The legend is that of op.py.

Pairs are sorted by expert, so those of the rank's experts, which are neighbours, are contiguous. A rotation of the
order puts them first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.gemm.route import op
from ridgeline.kernels.gemm.route.op import Routes

BLOCK = 1024  # pairs of a program, and at least the experts of a rank that it writes the starts of


@triton.jit(do_not_specialize=["first", "pairs"])
def some_kernel(
    expert_ptr, token_ptr, place_ptr, start_ptr, own_expert_ptr, own_token_ptr, own_place_ptr, own_start_ptr, first,
    pairs, COUNT: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the routes to COUNT experts from `first` on. The first program writes their starts."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(start_ptr + first)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(expert_ptr + pair, mask=inside, other=0) - first
    tl.store(own_expert_ptr + pair, tl.where((expert >= 0) & (expert < COUNT), expert, COUNT), mask=inside)
    place = tl.load(place_ptr + pair, mask=inside, other=0) - start
    tl.store(own_place_ptr + pair, tl.where(place < 0, place + pairs, place), mask=inside)
    turned = pair + start
    turned = tl.where(turned >= pairs, turned - pairs, turned)
    tl.store(own_token_ptr + pair, tl.load(token_ptr + turned, mask=inside, other=0), mask=inside)
    if tl.program_id(0) == 0:
        edge = tl.arange(0, STARTS)
        own = edge <= COUNT
        tl.store(own_start_ptr + edge, tl.load(start_ptr + first + edge, mask=own, other=0) - start, mask=own)


def to_some(routes: Routes, first: int, count: int) -> Routes:
    """Compute `op.to_some`."""
    pairs = len(routes.token_P)
    if not pairs:
        return op.to_some(routes, first, count)
    own = Routes(
        torch.empty_like(routes.expert_TK),
        routes.weight_TK,
        torch.empty_like(routes.token_P),
        torch.empty_like(routes.place_TK),
        routes.start_E1.new_empty(count + 1),
    )
    some_kernel[(triton.cdiv(pairs, BLOCK),)](
        routes.expert_TK, routes.token_P, routes.place_TK, routes.start_E1, own.expert_TK, own.token_P, own.place_TK,
        own.start_E1, first, pairs, COUNT=count, STARTS=triton.next_power_of_2(count + 1), BLOCK=BLOCK, num_warps=4,
        **launch_options(routes.token_P.device),
    )  # fmt: skip
    return own


AOT = (
    AotKernel(
        some_kernel,
        {
            **{name: "*i32" for name in some_kernel.arg_names if name.endswith("_ptr")},
            "first": "i32",
            "pairs": "i32",
        },
        {"COUNT": 64, "STARTS": 128, "BLOCK": BLOCK},
        num_warps=4,
        hot=True,
        archs=ONE_OF_EACH,
    ),
)
