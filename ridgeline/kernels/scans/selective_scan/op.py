"""The selective scan of Mamba, over rows of unlike lengths.

Every channel has a small state of its own. Each token lets it decay and adds the channel's input along a direction;
how fast, how much and along which direction depends on the token.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752.

Legend:
    N  block ids
    R  rows
    S  numbers of a channel's state
    T  tokens of the step
    X  channels
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import recurrence


@dataclass(frozen=True)
class ScanInputs(Inputs):
    """x_TX, dt_TX, b_TS, c_TS, z_TX: a token's numbers must lie side by side. rate_XS: negative; -exp(A_log) of
    checkpoints. Dense."""

    x_TX: Tensor
    dt_TX: Tensor
    rate_XS: Tensor
    b_TS: Tensor
    c_TS: Tensor
    skip_X: Tensor
    dt_bias_X: Tensor | None
    z_TX: Tensor | None
    of_tokens = ("x_TX", "dt_TX", "b_TS", "c_TS", "z_TX")

    def step_TX(self, dtype: torch.dtype) -> Tensor:
        """Return the size of each token's step."""
        dt_TX = self.dt_TX.to(dtype)
        return F.softplus(dt_TX if self.dt_bias_X is None else dt_TX + self.dt_bias_X.to(dtype))


def selective_scan(given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return y_TX, dense and of x's dtype, and replace the rows' states.

    With Δ = softplus(dt + dt_bias), each token does in each channel

        S ← exp(Δ · rate) · S + Δ · x · b;    y = S · c + skip · x;    y ← y · silu(z), if there is a z

    states_NXS: float32. It may be strided by block id.
    """
    x, b, c, rate_XS, skip_X = (v.double() for v in (given.x_TX, given.b_TS, given.c_TS, given.rate_XS, given.skip_X))
    step_TX, z_TX = given.step_TX(torch.float64), given.z_TX

    def rule(token: int, state_XS: Tensor) -> tuple[Tensor, Tensor]:
        step_X1 = step_TX[token, :, None]
        state_XS = (step_X1 * rate_XS).exp() * state_XS + step_X1 * x[token, :, None] * b[token]
        y_X = state_XS @ c[token] + skip_X * x[token]
        return y_X if z_TX is None else y_X * F.silu(z_TX[token].double()), state_XS

    return recurrence(rule, states_NXS, metadata, given.x_TX)


SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan,
    (
        Implementation("triton", "ridgeline.kernels.scans.selective_scan.triton:selective_scan", on_gpu),
        Implementation(
            "batch_invariant", "ridgeline.kernels.scans.selective_scan.triton:selective_scan_in_order", on_gpu
        ),
        Implementation("torch", "ridgeline.kernels.scans.selective_scan.torch_ops:selective_scan"),
    ),
)
