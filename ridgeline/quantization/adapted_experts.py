"""The matrices of experts, to whose products those of each token's adapter are added. An adapter has two thin matrices
for each expert, so an adapter and an expert together are what `kernels/gemm/lora` calls an adapter.

Legend:
    T  tokens
    M  model width
    E  experts
    A  places of adapters
    K  experts of a token
    P  pairs of a token and one of its experts, sorted by expert
    F  an expert's inner width
    G  gate and up together, or up
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.routing import PRODUCTS, UNGATED
from ridgeline.kernels.gemm.lora.op import AdapterFactors, TokensByAdapter
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.adapted import StepAdapters
from ridgeline.quantization.experts import ExpertWeights


@dataclass(frozen=True)
class AdaptedExperts:
    """Experts' matrices in any form that gives products without an activation, and those of the adapters that the
    device holds. Where no token of a step has an adapter, they multiply as `inner` does.

    factors: of adapter a and expert e at place a · E + e.
    """

    ops: Ops
    inner: ExpertWeights
    factors: AdapterFactors
    step: StepAdapters
    experts: int

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def gate_up(self, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
        if self.step.tokens is None:
            return self.inner.gate_up(x_TM, bias_EO, routes, gate)
        y_PG = self.inner.gate_up(x_TM, bias_EO, routes, PRODUCTS)
        x_PM = x_TM.index_select(0, routes.token_P[: len(y_PG)])
        self.ops.lora(y_PG, x_PM, self.factors, self._by_adapter(routes))
        return self.ops.activation(y_PG, gate) if gate in UNGATED else self.ops.gated_activation(y_PG, gate)

    def down(self, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None) -> Tensor:
        if self.step.tokens is None:
            return self.inner.down(h_PF, bias_EM, routes, add_TM)
        y_PM = h_PF.new_zeros(len(routes.token_P), self.factors.up_AOR.shape[1])
        self.ops.lora(y_PM, h_PF, self.factors, self._by_adapter(routes))
        weight_TK = routes.weight_TK.masked_fill(routes.expert_TK >= self.experts, 0)
        y_TM = (weight_TK[:, :, None] * y_PM[routes.place_TK.long()]).sum(1)
        y_TM = y_TM if add_TM is None else y_TM + add_TM
        return self.inner.down(h_PF, bias_EM, routes, y_TM.to(h_PF.dtype))

    def _by_adapter(self, routes: Routes) -> TokensByAdapter:
        """Sort pairs by the adapters of their tokens and by their experts."""
        line_T, tokens = self.step.line_T, self.step.tokens
        assert line_T is not None
        assert tokens is not None
        places, pairs = len(tokens.start_A1) - 1, len(routes.token_P)
        place_P = torch.arange(pairs, dtype=torch.int32, device=line_T.device)
        expert_P = torch.searchsorted(routes.start_E1[1:], place_P, right=True)
        line_P, last = line_T[routes.token_P.long()], places * self.experts
        key_P = torch.where((line_P < places) & (expert_P < self.experts), line_P * self.experts + expert_P, last)
        sorted_P, order_P = torch.sort(key_P, stable=True)
        edges = torch.arange(last + 1, dtype=key_P.dtype, device=key_P.device)
        adapter_P = torch.where(key_P < last, key_P + 1, 0)
        return TokensByAdapter(order_P.int(), torch.searchsorted(sorted_P, edges).int(), adapter_P.int())
