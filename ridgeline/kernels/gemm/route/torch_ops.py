"""Routing in few calls of plain torch, since on a CPU a call costs more than its work.

Legend: see op.py
    G  groups of experts
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.gemm.route.op import NORMALIZER, Router, Routes, shares
from ridgeline.kernels.small.norm.torch_ops import rms_norm


def route(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
) -> tuple[Tensor, Tensor, Routes]:
    """Compute what the reference does."""
    if norm_weight_M is not None:
        n_TM, s_TM = rms_norm(x_TM, residual_TM, norm_weight_M, eps)
    else:
        n_TM = s_TM = x_TM if residual_TM is None else x_TM + residual_TM
    bias_E, how = None if router.bias_E is None else router.bias_E.float(), router.how
    expert_TK, weight_TK = choose(F.linear(n_TM.float(), router.weight_EM.float(), bias_E), router)
    if live_T is not None:
        expert_TK = torch.where(live_T[:, None], expert_TK, how.experts)
    routes = in_order(expert_TK, weight_TK, how.experts)
    if tally_E is not None:
        tally_E += routes.start_E1.diff()
    return n_TM, s_TM, routes


def choose(logits_TE: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Return (experts, weights), [T, K] each, of float32 logits.

    A NaN makes all scores of its token NaN, and then a stable sort leaves the experts in their order, as it must be.
    """
    how, correction_E, expert_scale_E = router.how, router.correction_E, router.expert_scale_E
    score_TE = _scores(logits_TE, how)
    choice_TE = score_TE if correction_E is None else score_TE + correction_E
    if how.groups > 1:
        choice_TE = _of_best_groups(choice_TE, how)
    # A stable sort takes the first of equal scores, where top-k may take any
    chosen_TE = choice_TE.sort(dim=-1, descending=True, stable=True)
    expert_TK = chosen_TE.indices[:, : how.top_k]
    weight_TK = chosen_TE.values[:, : how.top_k] if choice_TE is score_TE else score_TE.gather(1, expert_TK)
    if how.score == "sparsemixer":
        weight_TK = shares(score_TE, expert_TK, weight_TK, how.nearness)
    if how.renormalize:
        weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + NORMALIZER)
    if how.scale != 1:
        weight_TK = weight_TK * how.scale
    return expert_TK, weight_TK if expert_scale_E is None else weight_TK * expert_scale_E[expert_TK]


def _scores(logits_TE: Tensor, how: RoutingSpec) -> Tensor:
    if how.score == "softmax":
        return torch.softmax(logits_TE, -1)
    # As with a softmax, one NaN is a NaN for all
    if how.score == "sigmoid":
        score_TE = torch.sigmoid(logits_TE)
        return score_TE + 0 * score_TE.sum(-1, keepdim=True)
    return torch.where(logits_TE.isnan().any(-1, keepdim=True), torch.nan, logits_TE)


def _of_best_groups(choice_TE: Tensor, how: RoutingSpec) -> Tensor:
    """Return the scores with those of experts in other groups than the best at -inf."""
    choice_TGE = choice_TE.unflatten(1, (how.groups, -1))
    best_TG = choice_TGE.topk(1 if how.group_score == "max" else 2, dim=-1).values.sum(-1)
    refused_TG = torch.ones_like(best_TG, dtype=torch.bool)
    refused_TG.scatter_(1, best_TG.sort(dim=1, descending=True, stable=True).indices[:, : how.top_groups], False)
    return choice_TGE.masked_fill(refused_TG[:, :, None], -torch.inf).flatten(1)


def in_order(expert_TK: Tensor, weight_TK: Tensor, experts: int) -> Routes:
    """Return the routes of tokens whose experts are known."""
    expert_TK = expert_TK.int()
    used = expert_TK.shape[1]
    expert_P, order_P = expert_TK.flatten().sort(stable=True)
    number_P = torch.arange(len(order_P), dtype=torch.int32, device=order_P.device)
    place_P = torch.empty_like(number_P).scatter_(0, order_P, number_P)
    each_E1 = torch.arange(experts + 1, dtype=torch.int32, device=order_P.device)
    return Routes(
        expert_TK,
        weight_TK,
        order_P.div(used, rounding_mode="floor").int(),
        place_P.view_as(expert_TK),
        torch.searchsorted(expert_P, each_E1, out_int32=True),
    )
