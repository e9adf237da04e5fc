"""Routing in plain torch: the norm is torch's own, and the rest is the reference."""

from __future__ import annotations

from torch import Tensor

from ridgeline.core.expert_spec import RoutingSpec
from ridgeline.kernels.norm.torch_ops import rms_norm
from ridgeline.kernels.route import op
from ridgeline.kernels.route.op import Routes


def route(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router_EM: Tensor,
    router_bias_E: Tensor | None,
    correction_E: Tensor | None,
    expert_scale_E: Tensor | None,
    how: RoutingSpec,
    live_T: Tensor | None,
    tally_E: Tensor | None,
) -> tuple[Tensor, Tensor, Routes]:
    """Compute what the reference does."""
    if norm_weight_M is not None:
        n_TM, s_TM = rms_norm(x_TM, residual_TM, norm_weight_M, eps)
    else:
        n_TM = s_TM = x_TM if residual_TM is None else x_TM + residual_TM
    _, _, routes = op.route(
        n_TM, None, None, eps, router_EM, router_bias_E, correction_E, expert_scale_E, how, live_T, tally_E
    )
    return n_TM, s_TM, routes
