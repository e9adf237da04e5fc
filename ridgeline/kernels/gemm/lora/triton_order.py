"""A step's tokens sorted by adapter on a GPU, in one program: some twenty small kernels of torch would take as long as
adapters of a layer do.

Legend, beside that of op.py:
    B  tokens, padded
    N  rows of the step, padded
    K  adapters and none, padded
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gemm.lora import op
from ridgeline.kernels.gemm.lora.op import PANEL, TokensByAdapter, num_panels

MOST_TOKENS = 512  # that one program sorts
MOST_PAIRS = 1 << 16  # of a token and an adapter, and of a panel and an adapter


@triton.jit
def _keys(
    slots_ptr, start_ptr, adapter_ptr, token_B, rows, ADAPTERS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the adapter of each token, from 0; ADAPTERS: none. A token's row is found by halving."""
    row_B = token_B * 0
    half = N // 2
    while half > 0:
        end_B = tl.load(start_ptr + row_B + half, mask=row_B + half <= rows, other=2147483647)
        row_B = tl.where(end_B <= token_B, row_B + half, row_B)
        half = half // 2
    owned_B = row_B < rows
    slot_B = tl.load(slots_ptr + row_B, mask=owned_B, other=0)
    adapter_B = tl.load(adapter_ptr + slot_B, mask=owned_B, other=0)
    return tl.where(adapter_B > 0, adapter_B - 1, ADAPTERS)


@triton.jit(do_not_specialize=["rows", "tokens"])
def by_adapter_kernel(
    slots_ptr, row_start_ptr, adapter_ptr, order_ptr, start_ptr, token_adapter_ptr, panel_ptr, ready_ptr, rows, tokens,
    ADAPTERS: tl.constexpr, MOST: tl.constexpr, PANELS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, B: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Write all of `TokensByAdapter`. MOST: 0: without panels."""
    key_K = tl.arange(0, K)
    token_B = tl.arange(0, B)
    real_B = token_B < tokens
    key_B = _keys(slots_ptr, row_start_ptr, adapter_ptr, token_B, rows, ADAPTERS, N)
    tl.store(token_adapter_ptr + token_B, tl.where(key_B < ADAPTERS, key_B + 1, 0), mask=real_B)
    order_B = tl.sort(tl.where(real_B, key_B, K) * B + token_B)
    tl.store(order_ptr + token_B, order_B % B, mask=real_B)
    count_K = tl.sum(((key_B[:, None] == key_K[None, :]) & real_B[:, None]).to(tl.int32), 0)
    tl.store(start_ptr + key_K, tl.cumsum(count_K, 0) - count_K, mask=key_K <= ADAPTERS)
    if MOST > 0:
        panel_P = tl.arange(0, P)
        begins_PK = key_K[None, :] * MOST < (panel_P[:, None] + 1) * PANEL
        ends_PK = (key_K[None, :] + 1) * MOST > panel_P[:, None] * PANEL
        has_PK = begins_PK & ends_PK & ((count_K > 0) & (key_K < ADAPTERS))[None, :]
        has_P = ((tl.sum(has_PK.to(tl.int32), 1) > 0) & (panel_P < PANELS)).to(tl.int32)
        at_P = tl.cumsum(has_P, 0)
        tl.store(panel_ptr + at_P, panel_P, mask=has_P > 0)
        tl.store(panel_ptr, tl.sum(has_P, 0))
        tl.store(ready_ptr, 0)


def by_adapter(
    slots_R: Tensor, start_R1: Tensor, adapter_S: Tensor, tokens: int, adapters: int, most: int = 0
) -> TokensByAdapter:
    """Compute `op.by_adapter`. Tokens, rows or adapters that are too many for one program are sorted by torch.

    It is launched without dependent launch, so every program of a later kernel may read the results without waiting.
    """
    n, k = triton.next_power_of_2(len(slots_R) + 1), triton.next_power_of_2(adapters + 1)
    block, panels = triton.next_power_of_2(max(2, tokens)), num_panels(adapters, most)
    p = triton.next_power_of_2(max(1, panels))
    pairs = max(block, p) * k
    if not tokens or tokens > MOST_TOKENS or pairs > MOST_PAIRS:
        return op.by_adapter(slots_R, start_R1, adapter_S, tokens, adapters, most)
    sizes = tokens, adapters + 1, tokens, 1 + panels, 1
    order_T, start_A1, adapter_T, panel_P1, ready_1 = (
        torch.empty(size, dtype=torch.int32, device=slots_R.device) for size in sizes
    )
    by_adapter_kernel[(1,)](
        slots_R, start_R1, adapter_S, order_T, start_A1, adapter_T, panel_P1, ready_1, len(slots_R), tokens,
        ADAPTERS=adapters, MOST=most, PANELS=panels, N=n, K=k, P=p, B=block, PANEL=PANEL,
        num_warps=max(4, min(16, pairs // 2048)),
    )  # fmt: skip
    found = TokensByAdapter(order_T, start_A1, adapter_T)
    return found._replace(panel_P1=panel_P1, most=most, ready_1=ready_1, turns=itertools.count(1)) if most else found


_NAMES = (
    "slots_ptr",
    "row_start_ptr",
    "adapter_ptr",
    "order_ptr",
    "start_ptr",
    "token_adapter_ptr",
    "panel_ptr",
    "ready_ptr",
)
_CUT = {"ADAPTERS": 64, "MOST": 16, "PANELS": 16, "N": 64, "K": 128, "P": 16, "B": 64, "PANEL": PANEL}
AOT = (
    AotKernel(
        by_adapter_kernel, dict.fromkeys(_NAMES, "*i32") | {"rows": "i32", "tokens": "i32"}, _CUT, num_warps=4,
        hot=True, archs=ONE_OF_EACH,
    ),
)  # fmt: skip
