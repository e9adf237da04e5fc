"""Linear maps on a CPU whose every output has the same bits, however many tokens stand beside it. The legend is that of
op.py."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.fixed_tiles import in_tiles
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.fixed_tiles import gated_activation
from ridgeline.kernels.small.norm.fixed_tiles import rms_norm


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return in_tiles(lambda tile_TI: [F.linear(tile_TI, weight_OI, bias_O)], x_TI)[0]


norm_linear = in_three(rms_norm, linear, gated_activation)
