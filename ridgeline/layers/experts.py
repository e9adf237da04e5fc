"""A mixture of experts: a router, the experts' stacked weights, and an expert that all tokens share.

Legend:
    T  tokens of the step
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, T · K, sorted by expert
    F  an expert's inner width
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.expert_spec import ExpertsSpec
from ridgeline.kernels.route.op import Routes
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import feed_forward
from ridgeline.layers.norm import Norm
from ridgeline.quantization.experts import ExpertWeights, StackedWeights, prepare_experts


class ExpertStack(nn.Module):
    """One matrix of every expert, or several of them fused.

    parts: the rows of each fused projection of one expert. The weight is [experts, sum(parts), inputs].
    weight: the parameter that is loaded and trained. It is None once another form has taken its place.
    matrices: the form that multiplies.
    """

    weight: nn.Parameter | None
    matrices: ExpertWeights

    def __init__(self, experts: int, inputs: int, parts: tuple[int, ...], bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts
        self.ops, self.scheme = build.ops, build.scheme
        self.weight = weight = build.parameter(experts, sum(parts), inputs)
        self.bias = build.parameter(experts, sum(parts)) if bias else None
        self.matrices = StackedWeights(build.ops, weight)

    def prepare(self) -> None:
        """Hold the loaded weights in the form of their scheme. If that is another form, the parameter is let go."""
        if self.weight is None:
            return
        loaded = StackedWeights(self.ops, self.weight)
        self.matrices = prepare_experts(loaded, self.scheme)
        if self.matrices is not loaded:
            self.weight = None

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weights if they are not a parameter, otherwise 0."""
        return self.matrices.nbytes if self.weight is None else 0


class Experts(nn.Module):
    """The feed-forward of an `ExpertsSpec`.

    tally_E: int64, how many tokens each expert has got since the engine began.
    """

    tally_E: Tensor

    def __init__(self, spec: ExpertsSpec, width: int, build: Build) -> None:
        super().__init__()
        how = spec.routing
        self.spec, self.ops = spec, build.ops
        self.router = build.parameter(how.experts, width)
        self.router_bias = build.parameter(how.experts) if how.bias else None
        self.correction = build.parameter(how.experts, dtype=torch.float32) if how.correction else None
        if self.correction is not None:
            self.correction.requires_grad_(False)  # choices have no gradient, so its training has a rule of its own
        self.expert_scale = build.parameter(how.experts) if how.expert_scale else None
        both = (spec.intermediate_size, spec.intermediate_size)
        self.gate_up = ExpertStack(how.experts, width, both, spec.bias, build.within("gate_up"))
        self.down = ExpertStack(how.experts, spec.intermediate_size, (width,), spec.bias, build.within("down"))
        self.shared = feed_forward(spec.shared, width, build.within("shared")) if spec.shared else None
        self.shared_gate = Linear(width, (1,), False, build.within("shared_gate")) if spec.shared_gate else None
        tally_E = torch.zeros(how.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("tally_E", tally_E, persistent=False)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (what the experts add to the residual, the residual before it): [T, M] each."""
        n_TM, s_TM, routes = self.route(norm, x_TM, residual_TM, live_T)
        h_PF = self.gate_up.matrices.gate_up(n_TM, self.gate_up.bias, routes, self.spec.activation)
        return self.down.matrices.down(h_PF, self.down.bias, routes, self._shared(n_TM)), s_TM

    def route(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Routes]:
        """Return (the normalised input, the residual, the tokens' routes)."""
        if norm is not None and norm.bias is not None:  # a LayerNorm, which no op fuses with the router
            (x_TM, before_TM), residual_TM, norm = norm(x_TM, residual_TM), None, None
        else:
            before_TM = None
        n_TM, s_TM, routes = self.ops.route(
            x_TM,
            residual_TM,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.router,
            self.router_bias,
            self.correction,
            self.expert_scale,
            self.spec.routing,
            live_T,
            self.tally_E,
        )
        return n_TM, s_TM if before_TM is None else before_TM, routes

    def _shared(self, n_TM: Tensor) -> Tensor | None:
        """Return the shared expert's output, or None."""
        if self.shared is None:
            return None
        y_TM, _ = self.shared(None, n_TM, None)
        return y_TM if self.shared_gate is None else y_TM * torch.sigmoid(self.shared_gate(n_TM))
