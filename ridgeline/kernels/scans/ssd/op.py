"""The recurrence of Mamba-2, over rows of unlike lengths.

A head's state is a matrix. Each token lets it decay by one number, and adds the head's input along a direction that
the heads of a group share.

Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.

Legend:
    G  groups of heads; head h is of group h // (H / G)
    H  heads
    N  block ids
    P  head width
    R  rows
    S  state width
    T  tokens of the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import decaying, recurrence


@dataclass(frozen=True)
class SsdInputs(Inputs):
    """x_THP, dt_TH, b_TGS, c_TGS: a token's numbers must lie side by side. rate_H: negative; -exp(A_log) of
    checkpoints. dt_min, dt_max: bounds of a token's step."""

    x_THP: Tensor
    dt_TH: Tensor
    rate_H: Tensor
    b_TGS: Tensor
    c_TGS: Tensor
    skip_H: Tensor
    dt_bias_H: Tensor
    dt_min: float
    dt_max: float
    of_tokens = ("x_THP", "dt_TH", "b_TGS", "c_TGS")

    @property
    def share(self) -> int:
        """The number of heads of a group."""
        return self.x_THP.shape[1] // self.b_TGS.shape[1]

    def step_TH(self, dtype: torch.dtype) -> Tensor:
        """Return the size of each token's step."""
        return F.softplus(self.dt_TH.to(dtype) + self.dt_bias_H.to(dtype)).clamp(self.dt_min, self.dt_max)


def ssd(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return y_THP, dense and of x's dtype, and replace the rows' states.

    With Δ = softplus(dt + dt_bias), but at least dt_min and at most dt_max, each token does in each head

        S ← exp(Δ · rate) · S + Δ · x ⊗ b;    y = S c + skip · x

    states_NHPS: float32. It may be strided by block id.
    """
    b_THS, c_THS = (v.double().repeat_interleave(given.share, dim=1) for v in (given.b_TGS, given.c_TGS))
    x, step_TH = given.x_THP.double(), given.step_TH(torch.float64)
    left_TH1, skip_H1 = (step_TH * given.rate_H.double()).exp()[..., None], given.skip_H.double()[:, None]
    transposed = decaying(c_THS, b_THS, step_TH[..., None] * x, left_TH1, 1.0)

    def rule(token: int, state_HPS: Tensor) -> tuple[Tensor, Tensor]:
        y_HP, state_HSP = transposed(token, state_HPS.mT)
        return y_HP + skip_H1 * x[token], state_HSP.mT

    return recurrence(rule, states_NHPS, metadata, given.x_THP)


SSD = Op(
    "ssd",
    ssd,
    (
        Implementation("triton", "ridgeline.kernels.scans.ssd.triton:ssd", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.scans.ssd.triton:ssd_in_order", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.ssd.torch_ops:ssd"),
    ),
    matrix=True,
)
