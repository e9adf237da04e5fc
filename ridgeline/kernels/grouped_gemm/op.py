"""Products of tokens with their own experts' matrices. No token is dropped, whatever the counts.

A mixture's feed-forward is two ops. The first gathers each expert's tokens, multiplies them with gate and up and
applies the gated activation. The second multiplies with down and adds up each token's experts in the order of its
choice or of their numbers, so that the sum does not depend on the tokens beside it.

Matrices are plain stacks, or in FP8 or codes (matrices.py).

Legend:
    T  tokens
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, T · K, sorted by expert
    F  an expert's inner width
    G  2 F: the rows of gate, then those of up; without a gate F
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.core.expert_spec import UNGATED
from ridgeline.core.weight_format import CodedFormat, Fp8Format, WeightFormat
from ridgeline.kernels.activation.op import activation, gated_activation
from ridgeline.kernels.coded_gemm import op as coded
from ridgeline.kernels.fp8_gemm.op import to_fp8
from ridgeline.kernels.grouped_gemm.matrices import Matrices, product, shape_of, stacked
from ridgeline.kernels.op import Implementation, Op, has_byte_products, on_gpu
from ridgeline.kernels.route.op import Routes, in_order


def grouped_gate_up(x_TM: Tensor, weight_EGM: Matrices, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Return act(gate(x)) * up(x) of every pair, by each pair's own expert: [P, F] in the dtype of `x_TM`. Rows of
    pairs that nobody computes are undefined.

    gate: the activation. Experts with one that is in UNGATED have no gate: their matrices are [F, M], and the result is
        act(up(x)).

    Activations beside FP8 weights are rounded as the weights' format says. An implementation may leave them as they
    are, or find finer scales than a static one, and may round dequantized weights to the dtype of `x_TM`.
    """
    pairs, apply = len(routes.token_P), activation if gate in UNGATED else gated_activation
    inner = shape_of(weight_EGM)[1] // (1 if gate in UNGATED else 2)
    y_PF = torch.zeros(pairs, inner, dtype=x_TM.dtype, device=x_TM.device)
    for expert, (first, end) in enumerate(_spans(routes)):
        if first < end:
            bias_G = None if bias_EG is None else bias_EG[expert]
            y_NG = product(x_TM[routes.token_P[first:end].long()], weight_EGM, expert, bias_G)
            y_PF[first:end] = apply(y_NG, gate).to(x_TM.dtype)
    return y_PF


def grouped_down(
    h_PF: Tensor, weight_EMF: Matrices, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Return, for every token, the sum over its experts of weight · (down(h) + bias), plus `add_TM` if there is one:
    [T, M] in the dtype of `h_PF`. Sums are in float32. Tokens that go nowhere get `add_TM` alone, or 0. Roundings are
    those of `grouped_gate_up`.

    add_TM: another part of the feed-forward's output (a shared expert's).
    """
    tokens, used = routes.expert_TK.shape
    experts, width, _ = shape_of(weight_EMF)
    y_PM = torch.zeros(tokens * used, width, device=h_PF.device)
    for expert, (first, end) in enumerate(_spans(routes)):
        if first < end:
            bias_M = None if bias_EM is None else bias_EM[expert]
            y_PM[first:end] = product(h_PF[first:end], weight_EMF, expert, bias_M)
    computed_TK = routes.expert_TK < experts
    weight_TK = torch.where(computed_TK, routes.weight_TK, 0)
    y_TKM = torch.where(computed_TK[:, :, None], y_PM[routes.place_TK.long()], 0)
    y_TM = (weight_TK[:, :, None] * y_TKM).sum(1)
    return (y_TM if add_TM is None else y_TM + add_TM.float()).to(h_PF.dtype)


def _spans(routes: Routes) -> list[tuple[int, int]]:
    start = routes.start_E1.tolist()
    return list(pairwise(start))


@dataclass(frozen=True)
class Case:
    """A case of both ops for tests and benchmarks.

    skew: 0 spreads tokens over experts alike; larger numbers send more of them to the first experts.
    dead: so many of the last tokens go nowhere.
    format: the form of the matrices; None: as they are.
    scales: the dtype of the scales of codes.
    """

    tokens: int
    width: int
    inner: int
    experts: int
    used: int
    gate: str = "silu"
    bias: bool = False
    add: bool = False
    skew: float = 0.0
    dead: int = 0
    format: WeightFormat | None = None
    scales: torch.dtype = torch.float16

    def routes(self, device: torch.device, seed: int = 0) -> Routes:
        """Return random routes; each token's experts differ."""
        generator = torch.Generator(device).manual_seed(seed)
        score_TE = torch.rand(self.tokens, self.experts, generator=generator, device=device)
        score_TE += self.skew * torch.linspace(1, 0, self.experts, device=device)
        weight_TK, expert_TK = score_TE.topk(self.used, dim=1)
        expert_TK[self.tokens - self.dead :] = self.experts
        return in_order(expert_TK.int(), weight_TK / weight_TK.sum(1, keepdim=True), self.experts)

    def gate_up_inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple:
        """Return random inputs of the first op, with outputs of order one."""
        outputs = self.inner if self.gate in UNGATED else 2 * self.inner
        x_TM, weight_EGM = self._operands(self.tokens, outputs, self.width, dtype, device, seed)
        bias_EG = self._normal(seed + 1, device, self.experts, outputs).to(dtype) if self.bias else None
        return x_TM, weight_EGM, bias_EG, self.routes(device, seed), self.gate

    def down_inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple:
        """Return random inputs of the second op, with outputs of order one."""
        h_PF, weight_EMF = self._operands(self.tokens * self.used, self.width, self.inner, dtype, device, seed)
        bias_EM = self._normal(seed + 1, device, self.experts, self.width).to(dtype) if self.bias else None
        add_TM = self._normal(seed + 2, device, self.tokens, self.width).to(dtype) if self.add else None
        return h_PF, weight_EMF, bias_EM, self.routes(device, seed), add_TM

    def _operands(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> tuple[Tensor, Matrices]:
        x = self._normal(seed + 4, device, rows, inputs).to(dtype)
        if isinstance(self.format, CodedFormat):
            case = coded.Case(rows, inputs, outputs, self.format, scales=self.scales)
            generator = torch.Generator(device).manual_seed(seed + 3)
            return x, stacked([coded.random_codes(case, device, generator) for _ in range(self.experts)])
        weight = self._normal(seed + 3, device, self.experts, outputs, inputs).mul_(inputs**-0.5)
        if isinstance(self.format, Fp8Format):
            return x, to_fp8(weight, self.format)
        return x, weight.to(dtype)

    @staticmethod
    def _normal(seed: int, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


CASES = (
    Case(1, 64, 48, experts=8, used=2),
    Case(2, 64, 32, experts=4, used=2, bias=True, gate="swiglu_clamped"),
    Case(5, 96, 64, experts=16, used=4, add=True, dead=2),
    Case(8, 256, 96, experts=60, used=4, gate="gelu_tanh"),
    Case(33, 64, 40, experts=8, used=2, skew=3.0),
    Case(64, 128, 64, experts=128, used=8, add=True),
    Case(200, 64, 64, experts=4, used=1, bias=True, skew=1.0),
    Case(3, 64, 40, experts=8, used=2, gate="relu2", dead=1),
    Case(70, 96, 64, experts=8, used=3, gate="relu2", bias=True),
)

_HERE = "ridgeline.kernels.grouped_gemm"
GROUPED_GATE_UP = Op(
    "grouped_gate_up",
    grouped_gate_up,
    (
        Implementation("triton", f"{_HERE}.triton:grouped_gate_up", on_gpu),
        Implementation("panels", f"{_HERE}.panels:grouped_gate_up", has_byte_products),
        Implementation("torch", f"{_HERE}.torch_ops:grouped_gate_up"),
        Implementation("batch_invariant", f"{_HERE}.batch_invariant:grouped_gate_up", on_gpu),
    ),
)
GROUPED_DOWN = Op(
    "grouped_down",
    grouped_down,
    (
        Implementation("triton", f"{_HERE}.triton:grouped_down", on_gpu),
        Implementation("panels", f"{_HERE}.panels:grouped_down", has_byte_products),
        Implementation("torch", f"{_HERE}.torch_ops:grouped_down"),
        Implementation("batch_invariant", f"{_HERE}.batch_invariant:grouped_down", on_gpu),
    ),
)
