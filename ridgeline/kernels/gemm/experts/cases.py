"""Cases of experts' products, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, as_cases, generator
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.routing import UNGATED
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format, WeightFormat
from ridgeline.kernels.gemm.codes import cases as coded_cases
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.codes.op import MXFP4, MXFP8, W4
from ridgeline.kernels.gemm.experts.cost import grouped_down_cost, grouped_gate_up_cost, touched
from ridgeline.kernels.gemm.experts.matrices import Matrices, stacked
from ridgeline.kernels.gemm.fp8.cases import ROUNDING
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS, to_fp8
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
        if device.type == "meta":
            return _without_memory(self, device)
        score_TE = torch.rand(self.tokens, self.experts, generator=generator(device, seed), device=device)
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
            made = generator(device, seed + 3)
            return x, stacked([coded_cases.random_codes(case, device, made) for _ in range(self.experts)])
        weight = self._normal(seed + 3, device, self.experts, outputs, inputs).mul_(inputs**-0.5)
        if isinstance(self.format, Fp8Format):
            return x, to_fp8(weight, self.format)
        return x, weight.to(dtype)

    @staticmethod
    def _normal(seed: int, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator(device, seed), device=device)

    @property
    def label(self) -> str:
        skew = f" skew {self.skew:g}" if self.skew else ""
        return f"{self.tokens}x{self.used} of {self.experts} {self.width}x{self.inner}{skew} {self.form}".rstrip()

    @property
    def form(self) -> str:
        if isinstance(self.format, Fp8Format):
            return "fp8-block" if self.format.block else "fp8"
        if self.format == MXFP8:
            return "MXFP8"
        return CodedCase(1, self.width, 1, self.format).form if isinstance(self.format, CodedFormat) else ""

    def weight_itemsize(self, itemsize: int) -> float:
        """The bytes of a weight, with its share of the scales."""
        if isinstance(self.format, CodedFormat):
            return CodedCase(1, self.width, 1, self.format, scales=self.scales).weight_itemsize(itemsize)
        return itemsize if self.format is None else 1

    @property
    def in_bytes(self) -> bool:
        rounds = isinstance(self.format, Fp8Format) and self.format.activations is not None
        return rounds or self.format == MXFP8

    @property
    def rounding(self) -> int:
        """The part of `slack` for activations that may be rounded, as `Fp8Case` says."""
        return ROUNDING if self.in_bytes else 0

    @property
    def reached(self) -> float:
        """The number of experts that uniform routing reaches."""
        return touched(self.tokens, self.experts, self.used)


def _without_memory(case: ExpertsCase, device: torch.device) -> Routes:
    """Return routes whose tensors have no memory."""
    expert_TK = torch.empty(case.tokens, case.used, dtype=torch.int32, device=device)
    token_P = torch.empty(expert_TK.numel(), dtype=torch.int32, device=device)
    start_E1 = torch.empty(case.experts + 1, dtype=torch.int32, device=device)
    return Routes(expert_TK, expert_TK.float(), token_P, torch.empty_like(expert_TK), start_E1)


class GateUpCase(ExpertsCase, OpCase):
    """The first op."""

    epsilons: ClassVar[int] = 32
    bare: ClassVar[bool] = True

    @property
    def slack(self) -> int:
        return 16 * self.width + self.rounding

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        return self.gate_up_inputs(dtype, device, seed)

    def cost(self, itemsize: int) -> Cost:
        return grouped_gate_up_cost(
            self.tokens, self.width, self.inner, itemsize=itemsize, used=self.used, reached=self.reached,
            kind=self.gate, bias=self.bias, weight_itemsize=self.weight_itemsize(itemsize),
        )  # fmt: skip


class DownCase(ExpertsCase, OpCase):
    """The second op."""

    epsilons: ClassVar[int] = 8
    bare: ClassVar[bool] = True

    @property
    def slack(self) -> int:
        return self.inner + self.rounding

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        return self.down_inputs(dtype, device, seed)

    def cost(self, itemsize: int) -> Cost:
        return grouped_down_cost(
            self.tokens, self.inner, self.width, itemsize=itemsize, used=self.used, reached=self.reached,
            bias=self.bias, add=self.add, weight_itemsize=self.weight_itemsize(itemsize),
        )  # fmt: skip


CASES = (
    ExpertsCase(1, 64, 48, experts=8, used=2),
    ExpertsCase(2, 64, 32, experts=4, used=2, bias=True, gate="swiglu_clamped"),
    ExpertsCase(3, 64, 32, experts=4, used=2, gate="silu_clamped_7"),
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

QWEN3 = ExpertsCase(1, 2048, 768, experts=128, used=8, add=True)
GPT_OSS = ExpertsCase(1, 2880, 2880, 32, 4, "swiglu_clamped", bias=True, add=True)
MIXTRAL = ExpertsCase(1, 4096, 14_336, 8, 2, add=True)
GPT_OSS_MXFP4 = replace(GPT_OSS, format=MXFP4, scales=torch.uint8)
QWEN3_MXFP8 = replace(QWEN3, format=MXFP8, scales=torch.uint8)
TIMED = (1, 8, 64, 256, 1024, 8192)
# As many tokens as decide between the cuts, and some that are unevenly spread
SWEPT = [
    *(replace(QWEN3, tokens=t) for t in (*TIMED, 2, 4, 32, 128, 512, 2048)),
    *(replace(GPT_OSS, tokens=t) for t in (*TIMED, 2)),
    *(replace(MIXTRAL, tokens=t) for t in (1, 8, 64, 1024, 8192)),
    *(replace(m, tokens=t, skew=s) for m in (QWEN3, GPT_OSS, MIXTRAL) for t, s in ((5, 0.0), (40, 3.0), (333, 1.0))),
    *(replace(GPT_OSS_MXFP4, tokens=t) for t in TIMED),
    *(replace(QWEN3, tokens=t, format=how) for how in (IN_BLOCKS, BY_TOKEN) for t in TIMED),
    *(replace(GPT_OSS_MXFP4, tokens=t, skew=1.0) for t in (3, 40, 700)),
    *(replace(QWEN3_MXFP8, tokens=t) for t in TIMED),
    *(replace(QWEN3_MXFP8, tokens=t, skew=1.0) for t in (3, 40, 700)),
    *(replace(QWEN3, tokens=t, format=W4) for t in TIMED),
    *(replace(QWEN3, tokens=t, skew=1.0, format=how) for how in (IN_BLOCKS, BY_TOKEN) for t in (3, 40, 700)),
]  # fmt: skip

OP_CASES = {
    name: Cases(as_cases(kind, ALIVE), as_cases(kind, REAL), as_cases(kind, SWEPT))
    for name, kind in (("grouped_gate_up", GateUpCase), ("grouped_down", DownCase))
}
