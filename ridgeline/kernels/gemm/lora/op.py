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
    P  panels of columns
    S  slots
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu

OUTPUTS = 128  # of a tile
PANEL = 64  # neighbouring columns of the A · R of all adapters, which the matrix units of Hopper multiply at once
MOST_PARTS = 4  # projections that are fused, where products of adapters are made beside those of the linear map


class TokensByAdapter(NamedTuple):
    """The tokens of a step, sorted by their adapters.

    order_T: the tokens of the first adapter, then those of the second, and so on; behind them those without. int32.
    start_A1: where each adapter's tokens begin there, and behind that where the last one's end. int32.
    adapter_T: the adapter of each token in its own place, from 1; 0: none. int32.
    panel_P1: how many panels have columns of the step's adapters, and which. Behind these lies anything. int32. None
        where it was not asked for: then products of adapters follow those of the linear map, as ops of their own.
    most: the most that a rank may be, for the panels; 0: without panels.
    ready_1: the turn of the last launch of the step whose input was there, 0 in front of the step's first one. int32.
        With panels alone.
    turns: those of the step's launches, from 1.
    """

    order_T: Tensor
    start_A1: Tensor
    adapter_T: Tensor
    panel_P1: Tensor | None = None
    most: int = 0
    ready_1: Tensor | None = None
    turns: Iterator[int] = iter(())


class AdapterFactors(NamedTuple):
    """The matrices of all adapters for one linear map, in which several projections may be fused.

    down_AKI: R rows for each part.
    up_AOR: with the adapter's scale.
    rank_A: so many of the R rows and columns count; 0: the adapter leaves this map alone. int32.
    tile_J3: the part of each tile of `OUTPUTS` outputs, its first output and its end. A tile has outputs of one part.
        int32.
    parts: the outputs of each part.
    """

    down_AKI: Tensor
    up_AOR: Tensor
    rank_A: Tensor
    tile_J3: Tensor
    parts: tuple[int, ...] = ()


class StepFactors(NamedTuple):
    """The matrices of all adapters for a linear map, and the tokens of a step by adapter."""

    factors: AdapterFactors
    tokens: TokensByAdapter


def beside(factors: AdapterFactors, tokens: TokensByAdapter) -> bool:
    """Return True if the op of the linear map can make the products of these adapters beside its own: ranks are those
    of the panels, the second matrices lie as panels do, and a tile of outputs has those of one part. Behind an
    adapter's rank both matrices must hold finite numbers."""
    (adapters, _, most), parts = factors.up_AOR.shape, factors.parts
    aligned = all(outputs % OUTPUTS == 0 for outputs in parts[:-1])
    in_panels = factors.up_AOR.stride() == (most, adapters * most, 1) and adapters * most % 8 == 0
    return tokens.most == most and in_panels and aligned and 0 < len(parts) <= MOST_PARTS


def by_adapter(
    slots_R: Tensor, start_R1: Tensor, adapter_S: Tensor, tokens: int, adapters: int, most: int = 0
) -> TokensByAdapter:
    """Sort a step's tokens by adapter.

    slots_R, start_R1: the rows' slots and first tokens, as in `kernels.step.op.StepRows`. Tokens behind the last row
        have no adapter.
    adapter_S: the adapter of each slot, from 1; 0: none.
    most: the most that a rank may be, for the panels; 0: without panels.
    """
    found = sorted_tokens(adapters_of(slots_R, start_R1, adapter_S, tokens), adapters)
    if not most:
        return found
    ready_1 = torch.zeros(1, dtype=torch.int32, device=slots_R.device)
    return found._replace(panel_P1=panels(found.start_A1, most), most=most, ready_1=ready_1, turns=itertools.count(1))


def panels(start_A1: Tensor, most: int) -> Tensor:
    """Return `TokensByAdapter.panel_P1`. most: the most that a rank may be."""
    adapters = len(start_A1) - 1
    adapter_A = torch.arange(adapters, device=start_A1.device)
    first_P1 = PANEL * torch.arange(num_panels(adapters, most), device=start_A1.device)[:, None]
    inside_PA = (adapter_A * most < first_P1 + PANEL) & ((adapter_A + 1) * most > first_P1)
    has_P = (inside_PA & (start_A1[1:] > start_A1[:-1])).any(1)
    return torch.cat([has_P.sum()[None], torch.argsort(~has_P, stable=True)]).int()


def num_panels(adapters: int, most: int) -> int:
    """Return the panels of so many adapters."""
    return -(-adapters * most // PANEL)


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
    return TokensByAdapter(order_T.int(), torch.searchsorted(sorted_T, edge_A1).int(), adapter_T.int())


def lora(y_TO: Tensor, x_TI: Tensor, factors: AdapterFactors, step: TokensByAdapter) -> None:
    """Add up · (down · x) of each token's adapter to y, in place. Tokens without an adapter keep their bits.

    down · x is rounded to the dtype of x; sums are in float32.
    """
    down_AKI, up_AOR, rank_A, tile_J3, _ = factors
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
BY_ADAPTER = Op("by_adapter", by_adapter, (Implementation("triton", f"{_HERE}.triton_order:by_adapter", on_gpu),))
LORA = Op(
    "lora",
    lora,
    (
        Implementation("triton", f"{_HERE}.triton:lora", on_gpu),
        Implementation("torch", f"{_HERE}.torch_ops:lora"),
    ),
    matrix=True,
)
