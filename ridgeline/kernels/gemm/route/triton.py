"""Routing on a GPU: one launch for up to 128 tokens, three for more.

If a gradient is wanted, plain torch runs, since these kernels have none. The programs of the one launch meet in
memory that launches behind each other share and leave at zero (base/counters.py).

Legend: see op.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.counters import ROUTE_BITS, ROUTE_COUNTERS, meeting
from ridgeline.kernels.base.launch import INTERPRETED, compute_capability, launch_options, num_multiprocessors
from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.base.tuned import GpuKind, remembered, tuned
from ridgeline.kernels.gemm.route import torch_ops
from ridgeline.kernels.gemm.route.choose import MOST_EXPERTS, MOST_TOKENS, Few, Many, choose, class_of
from ridgeline.kernels.gemm.route.few import few_kernel
from ridgeline.kernels.gemm.route.many import chunk, order_kernel, scored_kernel
from ridgeline.kernels.gemm.route.op import Router, Routes
from ridgeline.kernels.small.norm.triton import rms_norm

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def route(
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
    plan: Few | Many | None = None,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Routes]:
    """Compute `op.route`.

    plan: another cut than `choose` would take, for tests and tuning.
    fixed: the cut does not depend on the number of tokens.
    """
    (tokens, width), device, how = x_TM.shape, x_TM.device, router.how
    learned = (x_TM, residual_TM, norm_weight_M, *router[:-1])
    if not tokens or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)):
        return torch_ops.route(x_TM, residual_TM, norm_weight_M, eps, router, live_T, tally_E)
    plan = plan or _tuned(x_TM, how.experts, fixed=fixed)
    hopper = compute_capability(device) == (9, 0)
    plan = plan or choose(tokens, width, how.experts, fixed=fixed, itemsize=x_TM.itemsize, hopper=hopper)
    routes = _empty(tokens, how, device)
    if isinstance(plan, Many):
        n_TM, s_TM = _normalised(x_TM, residual_TM, norm_weight_M, eps)
        launch_many(plan, n_TM, router, live_T, tally_E, routes)
        return n_TM, s_TM, routes
    x_TM, residual_TM = _packed(x_TM), _packed(residual_TM)
    s_TM = x_TM if residual_TM is None else torch.empty(tokens, width, dtype=x_TM.dtype, device=device)
    n_TM = s_TM if norm_weight_M is None else torch.empty(tokens, width, dtype=x_TM.dtype, device=device)
    launch_few(plan, x_TM, residual_TM, norm_weight_M, eps, router, live_T, tally_E, n_TM, s_TM, routes)
    return n_TM, s_TM, routes


def _tuned(x_TM: Tensor, experts: int, *, fixed: bool) -> Few | Many | None:
    """Return the cut that was the fastest on this kind of GPU, if one is known."""
    if fixed or x_TM.itemsize != 2:
        return None
    tokens, width = x_TM.shape
    return _known(tokens, width, experts, GpuKind(compute_capability(x_TM.device), num_multiprocessors(x_TM.device)))


@remembered
def _known(tokens: int, width: int, experts: int, gpu: GpuKind) -> Few | Many | None:
    found: Few | Many | None = tuned("route", class_of(tokens, width, experts), gpu, Few, Many)
    return found


batch_invariant = partial(route, fixed=True)


def launch_few(
    plan: Few,
    x_TM: Tensor,
    residual_TM: Tensor | None,
    norm_weight_M: Tensor | None,
    eps: float,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
    n_TM: Tensor,
    s_TM: Tensor,
    routes: Routes,
) -> None:
    """Fill n, s and the routes in one launch."""
    (tokens, width), device, how = x_TM.shape, x_TM.device, router.how
    logits_TE = torch.empty(tokens, plan.experts, dtype=torch.float32, device=device)
    assert tokens <= min(MOST_TOKENS, ROUTE_COUNTERS - 1), tokens
    assert plan.experts <= MOST_EXPERTS, plan
    assert -(-tokens // 64) * plan.experts <= ROUTE_BITS, plan
    here = meeting(device)
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = torch.float32 if INTERPRETED and x_TM.dtype == torch.bfloat16 else x_TM.dtype
    residual = x_TM if residual_TM is None else residual_TM
    few_kernel[(triton.cdiv(how.experts, plan.rows), triton.cdiv(tokens, plan.each))](
        x_TM, residual, _or(norm_weight_M, x_TM), *_pointers(router, x_TM), _or(live_T, x_TM), _or(tally_E, x_TM), n_TM,
        s_TM,
        routes.expert_TK, routes.weight_TK, routes.token_P, routes.place_TK, routes.start_E1, logits_TE,
        here.bits, here.route, x_TM.stride(0), residual.stride(0), tokens, eps, how.scale,
        M=width, BLOCK=plan.block, ROWS=plan.rows, EACH=plan.each, TOKENS=plan.tokens, GROUP=plan.group,
        SLICES=plan.slices, DOT=_DTYPES[operands], NORM=norm_weight_M is not None, RESIDUAL=residual_TM is not None,
        LIVE=live_T is not None, TALLY=tally_E is not None, **_rules(router, plan),
        num_warps=plan.warps, **launch_options(device),
    )  # fmt: skip


def launch_many(
    plan: Many,
    n_TM: Tensor,
    router: Router,
    live_T: Tensor | None,
    tally_E: Tensor | None,
    routes: Routes,
) -> None:
    """Fill the routes of normalised tokens in two launches."""
    (tokens, width), device, how = n_TM.shape, n_TM.device, router.how
    tiles = triton.cdiv(tokens, plan.tokens)
    count = torch.empty(tiles * (plan.experts + 1), dtype=torch.int32, device=device)
    scratch = tiles * plan.tokens * plan.experts if plan.spread else 0
    logits = torch.empty(scratch, dtype=torch.float32, device=device)
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = torch.float32 if INTERPRETED and n_TM.dtype == torch.bfloat16 else n_TM.dtype
    scored_kernel[(tiles,)](
        n_TM, *_pointers(router, n_TM), _or(live_T, n_TM), routes.expert_TK, routes.weight_TK, routes.place_TK, count,
        logits, n_TM.stride(0), tokens,
        how.scale, M=width, BLOCK=plan.block, TOKENS=plan.tokens, DOT=_DTYPES[operands], LIVE=live_T is not None,
        SPREAD=plan.spread, **_rules(router, plan),
        num_warps=plan.warps, num_stages=plan.stages if n_TM.element_size() == 2 else 2, **launch_options(device),
    )  # fmt: skip
    each = triton.cdiv(tiles, plan.programs)
    order_kernel[(triton.cdiv(tiles, each),)](
        routes.expert_TK, count, _or(tally_E, count), routes.token_P, routes.place_TK, routes.start_E1, tokens, tiles,
        each, TOKENS=plan.tokens, E=how.experts, EXPERTS=plan.experts, K=how.top_k,
        CHOICES=triton.next_power_of_2(how.top_k), CHUNK=chunk(plan), TALLY=tally_E is not None, num_warps=8,
        **launch_options(device),
    )  # fmt: skip


def _pointers(router: Router, other: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of the router, with `other` in place of absent ones."""
    optional = (router.bias_E, router.correction_E, router.expert_scale_E)
    return router.weight_EM.contiguous(), *(_or(x, other) for x in optional)


def _rules(router: Router, plan: Few | Many) -> dict[str, Any]:
    """Return the kernels' constants that say how a token chooses."""
    how = router.how
    return {
        "E": how.experts,
        "EXPERTS": plan.experts,
        "K": how.top_k,
        "CHOICES": triton.next_power_of_2(how.top_k),
        "SIGMOID": how.score == "sigmoid",
        "RENORMALIZE": how.renormalize,
        "GROUPS": how.groups,
        "TOP_GROUPS": how.top_groups,
        "PAIR": how.group_score == "top2",
        "GROUPS_PADDED": triton.next_power_of_2(how.groups),
        "BIAS": router.bias_E is not None,
        "CORRECTION": router.correction_E is not None,
        "EXPERT_SCALE": router.expert_scale_E is not None,
        "NEARNESS": how.nearness if how.score == "sparsemixer" else -1.0,
    }


def _empty(tokens: int, how: RoutingSpec, device: torch.device) -> Routes:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    pairs = (tokens, how.top_k)
    return Routes(
        integers(*pairs),
        torch.empty(pairs, dtype=torch.float32, device=device),
        integers(tokens * how.top_k),
        integers(*pairs),
        integers(how.experts + 1),
    )


def _normalised(
    x_TM: Tensor, residual_TM: Tensor | None, norm_weight_M: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if norm_weight_M is not None:
        return rms_norm(x_TM, residual_TM, norm_weight_M, eps)
    s_TM = _packed(x_TM) if residual_TM is None else x_TM + residual_TM
    return s_TM, s_TM


def _packed(x_TM: Tensor | None) -> Any:
    return x_TM if x_TM is None or x_TM.stride(1) == 1 else x_TM.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return `other` in place of an absent tensor: any pointer will do, since the kernel reads what its flags say."""
    return other if x is None else x
