"""Cases of experts' products, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format, WeightFormat
from ridgeline.kernels.gemm.codes import cases as coded_cases
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.experts.cost import grouped_down_cost, grouped_gate_up_cost, touched
from ridgeline.kernels.gemm.experts.matrices import Matrices, stacked
from ridgeline.kernels.gemm.fp8.op import to_fp8
from ridgeline.kernels.gemm.route.cases import MIXTURES
from ridgeline.kernels.gemm.route.op import Routes, in_order


@dataclass(frozen=True)
class ExpertsCase:
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
            case = CodedCase(rows, inputs, outputs, self.format, scales=self.scales)
            generator = torch.Generator(device).manual_seed(seed + 3)
            return x, stacked([coded_cases.random_codes(case, device, generator) for _ in range(self.experts)])
        weight = self._normal(seed + 3, device, self.experts, outputs, inputs).mul_(inputs**-0.5)
        if isinstance(self.format, Fp8Format):
            return x, to_fp8(weight, self.format)
        return x, weight.to(dtype)

    @staticmethod
    def _normal(seed: int, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.used} of {self.experts} {self.width}x{self.inner}"

    @property
    def reached(self) -> float:
        """The number of experts that uniform routing reaches."""
        return touched(self.tokens, self.experts, self.used)


class GateUpCase(ExpertsCase, OpCase):
    """The first op."""

    epsilons: ClassVar[int] = 32

    @property
    def slack(self) -> int:
        return 16 * self.width

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        return self.gate_up_inputs(dtype, device, seed)

    def cost(self, itemsize: int) -> Cost:
        return grouped_gate_up_cost(
            self.tokens, self.width, self.inner, itemsize=itemsize, used=self.used, reached=self.reached,
            kind=self.gate, bias=self.bias,
        )  # fmt: skip


class DownCase(ExpertsCase, OpCase):
    """The second op."""

    epsilons: ClassVar[int] = 8

    @property
    def slack(self) -> int:
        return self.inner

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        return self.down_inputs(dtype, device, seed)

    def cost(self, itemsize: int) -> Cost:
        return grouped_down_cost(
            self.tokens, self.inner, self.width, itemsize=itemsize, used=self.used, reached=self.reached,
            bias=self.bias, add=self.add,
        )  # fmt: skip


CASES = (
    ExpertsCase(1, 64, 48, experts=8, used=2),
    ExpertsCase(2, 64, 32, experts=4, used=2, bias=True, gate="swiglu_clamped"),
    ExpertsCase(5, 96, 64, experts=16, used=4, add=True, dead=2),
    ExpertsCase(8, 256, 96, experts=60, used=4, gate="gelu_tanh"),
    ExpertsCase(33, 64, 40, experts=8, used=2, skew=3.0),
    ExpertsCase(64, 128, 64, experts=128, used=8, add=True),
    ExpertsCase(200, 64, 64, experts=4, used=1, bias=True, skew=1.0),
    ExpertsCase(3, 64, 40, experts=8, used=2, gate="relu2", dead=1),
    ExpertsCase(70, 96, 64, experts=8, used=3, gate="relu2", bias=True),
)

ALIVE = [case for case in CASES if not case.dead]
REAL = [ExpertsCase(t, m, f, experts=e, used=k) for m, f, e, k in MIXTURES for t in (1, 8, 64, 256, 8192)]

OP_CASES = {
    "grouped_gate_up": Cases(as_cases(GateUpCase, ALIVE), as_cases(GateUpCase, REAL)),
    "grouped_down": Cases(as_cases(DownCase, ALIVE), as_cases(DownCase, REAL)),
}
