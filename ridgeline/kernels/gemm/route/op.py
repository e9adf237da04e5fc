"""Routing of tokens to experts: norm, scores, the choice of the top k, and the order in which experts take tokens.

Nothing here depends on data but the numbers in tensors: shapes are fixed by T, E and K, so a step with experts can be
captured, and the host never waits for the device.

Legend:
    T  tokens
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, T · K
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, has_byte_products, on_gpu
from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.small.norm.op import rms_norm

NORMALIZER = 1e-20  # added to a sum of weights before it divides them


class Router(NamedTuple):
    """The weights and the rules by which a layer's tokens choose their experts.

    weight_EM, bias_E: they multiply a token into the experts' scores.
    correction_E: added to scores for the choice alone, float32 or the tokens' dtype.
    expert_scale_E: multiplies the experts' weights, float32 or the tokens' dtype.
    how: the rules of the choice.
    """

    weight_EM: Tensor
    bias_E: Tensor | None
    correction_E: Tensor | None
    expert_scale_E: Tensor | None
    how: RoutingSpec


class Routes(NamedTuple):
    """The experts that tokens go to. Pairs are sorted by expert; pairs of one expert keep the order of their tokens.

    expert_TK: int32, a token's experts in falling order of their choice scores (equal ones by index), or E for a token
        that belongs to no request: its pairs come last, and no expert computes them.
    weight_TK: float32.
    token_P: int32, the token of each pair in sorted order.
    place_TK: int32, the place of each pair in sorted order.
    start_E1: int32, the first place of each expert's pairs, then the number of pairs that are computed.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    token_P: Tensor
    place_TK: Tensor
    start_E1: Tensor


def route(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
) -> tuple[Tensor, Tensor, Routes]:
    """Return (n, s, routes). s = x + residual rounded to x's dtype, or s = x if there is no residual. n = rms_norm(s),
    or s if norm_weight is None. Routes follow from the router's products
    with n, which are float32 and are not rounded.

    A token whose scores hold NaN goes to experts 0 … K - 1 with weights NaN.

    norm_weight_M: float32 or x's dtype.
    live_T: bool; tokens for which it is False go nowhere. None: there are no such tokens.
    tally_E: int64; the number of tokens that each expert got is added to it.
    """
    s_TM = x_TM if residual_TM is None else x_TM + residual_TM
    n_TM = s_TM if norm_weight_M is None else rms_norm(s_TM, None, norm_weight_M, eps)[0]
    how = router.how
    expert_TK, weight_TK = choose(logits(n_TM, router), router)
    if live_T is not None:
        expert_TK = torch.where(live_T[:, None], expert_TK, how.experts)
    routes = in_order(expert_TK.int(), weight_TK, how.experts)
    if tally_E is not None:
        tally_E += routes.start_E1.diff()
    return n_TM, s_TM, routes


def logits(n_TM: Tensor, router: Router) -> Tensor:
    """Return the router's products with its bias: float32 [T, E]."""
    logits_TE = n_TM.float() @ router.weight_EM.float().T
    return logits_TE if router.bias_E is None else logits_TE + router.bias_E.float()


def choose(logits_TE: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Return (experts, weights), [T, K] each, of float32 logits."""
    how, correction_E, expert_scale_E = router.how, router.correction_E, router.expert_scale_E
    nan_T = logits_TE.isnan().any(1)
    score_TE = scores(logits_TE, how)
    choice_TE = score_TE if correction_E is None else score_TE + correction_E.float()
    if how.groups > 1:
        grouped_TGE = choice_TE.unflatten(1, (how.groups, -1))
        best = grouped_TGE.topk(1 if how.group_score == "max" else 2, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.sort(dim=1, descending=True, stable=True).indices[:, : how.top_groups], True)
        choice_TE = grouped_TGE.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    # A stable sort takes the first of equal scores, where top-k may take any
    expert_TK = choice_TE.sort(dim=1, descending=True, stable=True).indices[:, : how.top_k]
    expert_TK = torch.where(nan_T[:, None], torch.arange(how.top_k, device=expert_TK.device), expert_TK)
    weight_TK = score_TE.gather(1, expert_TK)
    if how.score == "sparsemixer":
        weight_TK = shares(score_TE, expert_TK, weight_TK, how.nearness)
    if how.renormalize:
        weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + NORMALIZER)
    weight_TK = weight_TK * how.scale
    if expert_scale_E is not None:
        weight_TK = weight_TK * expert_scale_E.float()[expert_TK]
    return expert_TK, torch.where(nan_T[:, None], torch.nan, weight_TK)


def scores(logits_TE: Tensor, how: RoutingSpec) -> Tensor:
    """Return the scores of float32 logits."""
    match how.score:
        case "sigmoid":
            return logits_TE.sigmoid()
        case "sparsemixer":
            return logits_TE
    return logits_TE.softmax(-1)


def shares(score_TE: Tensor, expert_TK: Tensor, best_TK: Tensor, nearness: float) -> Tensor:
    """Return each chosen expert's share in the softmax over those near it that were not chosen before: [T, K].

    best_TK: the experts' scores.
    """
    left_TE, found = score_TE, []
    for expert_T, best_T in zip(expert_TK.T, best_TK.T, strict=True):
        best_T1 = best_T[:, None]
        far_TE = (best_T1 - score_TE) / torch.maximum(score_TE.abs(), best_T1) > nearness
        found.append(1 / (left_TE - best_T1).exp().masked_fill(far_TE, 0.0).sum(1))
        left_TE = left_TE.scatter(1, expert_T[:, None].long(), -torch.inf)
    return torch.stack(found, 1)


def in_order(expert_TK: Tensor, weight_TK: Tensor, experts: int) -> Routes:
    """Return the routes of tokens whose experts are known."""
    order_P = expert_TK.flatten().sort(stable=True).indices
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    counts_E = torch.bincount(expert_TK.flatten(), minlength=experts + 1)[:experts]
    start_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    return Routes(
        expert_TK.int(),
        weight_TK,
        (order_P // expert_TK.shape[1]).int(),
        place_P.view_as(expert_TK).int(),
        start_E1.int(),
    )


def to_some(routes: Routes, first: int, count: int) -> Routes:
    """Return the routes to `count` experts from `first` on, which are numbered from 0. Pairs with others go nowhere.

    Pairs are sorted already, so turning their order around the circle brings these experts' to its beginning.
    """
    expert_TK, pairs = routes.expert_TK - first, len(routes.token_P)
    start_E1 = routes.start_E1[first : first + count + 1]
    turned_P = (torch.arange(pairs, device=start_E1.device) + start_E1[0]) % max(pairs, 1)
    return Routes(
        torch.where((expert_TK >= 0) & (expert_TK < count), expert_TK, count),
        routes.weight_TK,
        routes.token_P[turned_P],
        (routes.place_TK - start_E1[0]) % max(pairs, 1),
        start_E1 - start_E1[0],
    )


def without_waiting(expert_TK: Tensor, weight_TK: Tensor, count: int) -> Routes:
    """Return the routes of tokens whose experts are known, as `in_order` does, by calls that can be captured. The
    expert `count` stands for none."""
    expert_P, order_P = expert_TK.flatten().sort(stable=True)
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    edges = torch.arange(count + 1, dtype=expert_P.dtype, device=expert_P.device)
    return Routes(
        expert_TK,
        weight_TK,
        (order_P // expert_TK.shape[1]).int(),
        place_P.view_as(expert_TK).int(),
        torch.searchsorted(expert_P, edges, out_int32=True),
    )


ROUTE = Op(
    "route",
    route,
    (
        Implementation("triton", "ridgeline.kernels.gemm.route.triton:route", on_gpu),
        Implementation("native", "ridgeline.kernels.gemm.route.native:route", has_byte_products),
        Implementation("torch", "ridgeline.kernels.gemm.route.torch_ops:route"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.route.triton:batch_invariant", on_gpu),
    ),
)

ROUTE_TO_SOME = Op(
    "route_to_some",
    to_some,
    (Implementation("triton", "ridgeline.kernels.gemm.route.some:to_some", on_gpu),),
)

ORDER_PAIRS = Op(
    "order_pairs",
    without_waiting,
    (Implementation("triton", "ridgeline.kernels.gemm.route.order:ordered", on_gpu),),
)
