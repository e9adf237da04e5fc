"""Transfers of Mamba (kernels/transfer.py).

Every number of a state decays at a rate of its own, so what tokens add is no product: the op itself finds it.

Legend: that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.transfer import Decayed, wide
from ridgeline.kernels.turns import Pieces


def transfer(pieces: Pieces, dt_TX: Tensor, rate_XS: Tensor, dt_bias_X: Tensor | None, added_RXS: Tensor) -> Decayed:
    """Return what the op does to states; arguments as there. added_RXS: the states behind pieces that begin with
    zeros."""
    step_TX = F.softplus(wide(dt_TX) if dt_bias_X is None else wide(dt_TX) + dt_bias_X)
    total_RX = torch.stack([step_TX[start:end].sum(0) for start, end in pieces.spans])
    return Decayed((total_RX[..., None] * rate_XS).exp(), added_RXS)
