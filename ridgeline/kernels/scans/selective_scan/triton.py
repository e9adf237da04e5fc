"""The selective scan on a GPU: rows of one token by `triton_walk.py`, longer ones by `triton_tiles.py`, or by the
former in another cut.

Legend: that of op.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.selective_scan.op import ScanInputs
from ridgeline.kernels.scans.selective_scan.triton_tiles import Tiles, fits, tiles
from ridgeline.kernels.scans.selective_scan.triton_walk import LONG, SHORT, Walk, walk

PROMPTS = Tiles()  # the cut of steps with rows of several tokens, where the kernel fits; elsewhere LONG


def selective_scan(
    given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata, cut: Walk | Tiles | None = None
) -> Tensor:
    y_TX = torch.empty(given.x_TX.shape, dtype=given.x_TX.dtype, device=given.x_TX.device)
    if metadata.tokens_each == 1:
        walk(given, states_NXS, metadata, y_TX, "each", cut if isinstance(cut, Walk) else SHORT)
        return y_TX
    cut = cut or PROMPTS
    if isinstance(cut, Walk) or not fits(states_NXS.shape[2], given.b_TS.itemsize):
        walk(given, states_NXS, metadata, y_TX, "all", cut if isinstance(cut, Walk) else LONG)
        return y_TX
    walk(given, states_NXS, metadata, y_TX, "single")
    tiles(given, states_NXS, metadata, y_TX, cut)
    return y_TX


def selective_scan_in_order(given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its steps. The state is
    kept between steps as it is between tokens, in float32."""
    y_TX = torch.empty(given.x_TX.shape, dtype=given.x_TX.dtype, device=given.x_TX.device)
    walk(given, states_NXS, metadata, y_TX, "all")
    return y_TX
