"""Products of adapters by torch, one adapter after another. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.lora.op import AdapterFactors, TokensByAdapter


def lora(y_TO: Tensor, x_TI: Tensor, factors: AdapterFactors, step: TokensByAdapter) -> None:
    """Compute `op.lora`. It reads the numbers of tokens, so it waits for a GPU."""
    down_AKI, up_AOR, rank_A, tile_J3, _ = factors
    starts, ranks, most = step.start_A1.tolist(), rank_A.tolist(), up_AOR.shape[2]
    spans = _spans(tile_J3.tolist())
    for adapter, rank in enumerate(ranks):
        start, end = starts[adapter : adapter + 2]
        if start == end or not rank:
            continue
        token_t = step.order_T[start:end].long()
        x_tI, y_tO = x_TI.index_select(0, token_t), y_TO.index_select(0, token_t)
        for part, first, last in spans:
            h_tR = x_tI @ down_AKI[adapter, part * most : part * most + rank].T
            y_tO[:, first:last] += h_tR @ up_AOR[adapter, first:last, :rank].T
        y_TO.index_copy_(0, token_t, y_tO)


def _spans(tiles: list[list[int]]) -> list[tuple[int, int, int]]:
    """Return the part, the first output and the end of each part."""
    found: dict[int, tuple[int, int, int]] = {}
    for part, first, last in tiles:
        found[part] = (part, found[part][1] if part in found else first, last)
    return list(found.values())
