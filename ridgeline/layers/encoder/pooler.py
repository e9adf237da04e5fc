"""The end of a tower that embeds pictures: one vector of each view.

Legend:
    T  patches of all views, and their class tokens
    W  width of the tower
    L  views
    H  heads of the query
    D  width of a head
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.core.specs.tower import PoolerSpec
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.grids import Grid
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import MLP
from ridgeline.layers.norm import Norm


class ViewPooler(nn.Module):
    """The map of a `PoolerSpec`."""

    def __init__(self, spec: PoolerSpec, width: int, build: Build) -> None:
        super().__init__()
        self.heads = spec.heads
        if spec.mlp is None or spec.norm is None:
            return
        self.query = build.parameter(width)
        self.qkv = Linear(width, (width, width, width), True, build.within("qkv"))
        self.out = Linear(width, (width,), True, build.within("out"))
        self.norm = Norm(spec.norm, width, build)
        self.mlp = MLP(spec.mlp, width, build.within("mlp"))

    def forward(self, x_TW: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return a vector for each view: [L, W]. Class tokens stand before the patches of each view, if there are
        any."""
        counts = np.array([grid.patches for grid in grids])
        if not self.heads:
            firsts = np.cumsum(counts + 1) - counts - 1
            return x_TW[torch.from_numpy(firsts).to(x_TW.device)]
        found_LW = self.out(self._attended(x_TW, torch.from_numpy(counts).to(x_TW.device)))
        return torch.add(*self.mlp(self.norm, found_LW, None))

    def _attended(self, x_TW: Tensor, counts_L: Tensor) -> Tensor:
        """Return the query's attention to each view: [L, W]."""
        qkv = self.qkv(torch.cat((self.query[None].to(x_TW.dtype), x_TW))).unflatten(1, (3, self.heads, -1))
        q_HD, k_THD, v_THD = qkv[0, 0].float(), qkv[1:, 1], qkv[1:, 2]
        scores_TH = (k_THD.float() * q_HD).sum(-1) * q_HD.shape[-1] ** -0.5
        view_T = torch.repeat_interleave(torch.arange(len(counts_L), device=x_TW.device), counts_L)
        most_LH = torch.segment_reduce(scores_TH, "max", lengths=counts_L, axis=0, unsafe=True)
        weights_TH = torch.exp(scores_TH - most_LH[view_T])
        sums_LH = torch.segment_reduce(weights_TH, "sum", lengths=counts_L, axis=0, unsafe=True)
        weighted_THD = (weights_TH / sums_LH[view_T])[..., None] * v_THD.float()
        found_LHD = torch.segment_reduce(weighted_THD, "sum", lengths=counts_L, axis=0, unsafe=True)
        return found_LHD.flatten(1).to(x_TW.dtype)
