"""Mamba-2's recurrence on a GPU: rows of one token by `triton_walk.py`, longer ones by `prompts.py`. The legend
is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.ssd.choose import Cut, choose
from ridgeline.kernels.scans.ssd.op import SsdInputs
from ridgeline.kernels.scans.ssd.prompts import scan
from ridgeline.kernels.scans.ssd.triton_walk import Walk, walk


def ssd(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata, cut: Cut | Walk | None = None) -> Tensor:
    y_THP = torch.empty(given.x_THP.shape, dtype=given.x_THP.dtype, device=given.x_THP.device)
    one = cut if isinstance(cut, Walk) else Walk()
    if metadata.tokens_each == 1:
        walk(given, states_NHPS, metadata, y_THP, "each", one)
        return y_THP
    _, heads, width = given.x_THP.shape
    many = cut if isinstance(cut, Cut) else choose(heads, width, given.b_TGS.shape[2])
    walk(given, states_NHPS, metadata, y_THP, "single", one)
    scan(given, states_NHPS, metadata, y_THP, many)
    return y_THP


def ssd_in_order(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its steps. The state is
    kept between steps as it is between tokens, in float32."""
    y_THP = torch.empty(given.x_THP.shape, dtype=given.x_THP.dtype, device=given.x_THP.device)
    walk(given, states_NHPS, metadata, y_THP, "all")
    return y_THP
