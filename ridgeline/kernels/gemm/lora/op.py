"""The products of adapters of low rank (LoRA, Hu et al., arXiv 2106.09685), added to those of a linear map. Every token
has its own adapter, or none (Punica, Chen et al., arXiv 2310.18547).

Legend:
    T  tokens
    I  inputs
    O  outputs of all parts
    A  adapters that the device holds
    R  the most that an adapter's rank may be
    K  R times the parts
    J  tiles of outputs
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu

OUTPUTS = 128  # of a tile


class TokensByAdapter(NamedTuple):
    """The tokens of a step, sorted by their adapters.

    order_T: the tokens of the first adapter, then those of the second, and so on; behind them those without. int32.
    start_A1: where each adapter's tokens begin there, and behind that where the last one's end. int32.
    """

    order_T: Tensor
    start_A1: Tensor


class AdapterFactors(NamedTuple):
    """The matrices of all adapters for one linear map, in which several projections may be fused.

    down_AKI: R rows for each part.
    up_AOR: with the adapter's scale.
    rank_A: so many of the R rows and columns count; 0: the adapter leaves this map alone. int32.
    tile_J3: the part of each tile of `OUTPUTS` outputs, its first output and its end. A tile has outputs of one part.
        int32.
    """

    down_AKI: Tensor
    up_AOR: Tensor
    rank_A: Tensor
    tile_J3: Tensor


def by_adapter(slots_R: Tensor, start_R1: Tensor, adapter_S: Tensor, tokens: int, adapters: int) -> TokensByAdapter:
    """Sort a step's tokens by adapter.

    slots_R, start_R1: the rows' slots and first tokens, as in `kernels.step.op.StepRows`. Tokens behind the last row
        have no adapter.
    adapter_S: the adapter of each slot, from 1; 0: none.
    """
    return sorted_tokens(adapters_of(slots_R, start_R1, adapter_S, tokens), adapters)


def adapters_of(slots_R: Tensor, start_R1: Tensor, adapter_S: Tensor, tokens: int) -> Tensor:
    """Return the adapter of each token, from 1; 0: none. Arguments as in `by_adapter`."""
    token_T = torch.arange(tokens, device=slots_R.device, dtype=torch.int32)
    row_T = torch.searchsorted(start_R1[1:], token_T, right=True)
    adapter_R = adapter_S[slots_R.long()]
    owned_T = token_T < start_R1[-1]
    return torch.where(owned_T, adapter_R[row_T.clamp(max=len(slots_R) - 1)], 0)


def sorted_tokens(adapter_T: Tensor, adapters: int) -> TokensByAdapter:
    """Sort tokens by their adapters, from 1; 0: none. adapters: how many there may be."""
    key_T = torch.where(adapter_T > 0, adapter_T, adapters + 1)
    sorted_T, order_T = torch.sort(key_T, stable=True)
    edge_A1 = torch.arange(1, adapters + 2, device=key_T.device, dtype=key_T.dtype)
    return TokensByAdapter(order_T.int(), torch.searchsorted(sorted_T, edge_A1).int())


def lora(y_TO: Tensor, x_TI: Tensor, factors: AdapterFactors, step: TokensByAdapter) -> None:
    """Add up · (down · x) of each token's adapter to y, in place. Tokens without an adapter keep their bits.

    down · x is rounded to the dtype of x; sums are in float32.
    """
    down_AKI, up_AOR, rank_A, tile_J3 = factors
    most = up_AOR.shape[2]
    starts = step.start_A1.tolist()
    for adapter, (start, end) in enumerate(itertools.pairwise(starts)):
        token_t, rank = step.order_T[start:end].long(), int(rank_A[adapter])
        if start == end or not rank:
            continue
        x_tI, up_OR = x_TI[token_t].float(), up_AOR[adapter, :, :rank].float()
        for part, first, last in tile_J3.tolist():
            down_RI = down_AKI[adapter, part * most : part * most + rank].float()
            h_tR = (x_tI @ down_RI.T).to(x_TI.dtype).float()
            was_tO = y_TO[token_t, first:last].float()
            y_TO[token_t, first:last] = (was_tO + h_tR @ up_OR[first:last].T).to(y_TO.dtype)


def tiles(parts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the part, the first output and the end of each tile of fused projections with so many outputs."""
    found, first = list[tuple[int, int, int]](), 0
    for part, outputs in enumerate(parts):
        end = first + outputs
        found += [(part, at, min(at + OUTPUTS, end)) for at in range(first, end, OUTPUTS)]
        first = end
    return found


_HERE = "ridgeline.kernels.gemm.lora"
LORA = Op(
    "lora",
    lora,
    (
        Implementation("triton", f"{_HERE}.triton:lora", on_gpu),
        Implementation("torch", f"{_HERE}.torch_ops:lora"),
    ),
    matrix=True,
)
