"""Cases of products with plain weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, generator
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.plain.cost import linear_cost, norm_linear_cost
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand


class ProductCase(OpCase):
    """A case of a product with a weight, in whatever form that is. Subclasses have these fields.

    gate: of a product with a norm before it; None: it has none.
    """

    bare: ClassVar[bool] = True

    tokens: int
    in_width: int
    out_width: int
    bias: bool
    gate: str | None = None

    @property
    def shape(self) -> str:
        """The label without the bias."""
        return f"{self.tokens}x{self.out_width}x{self.in_width}"

    @property
    def label(self) -> str:
        return self.shape + (" bias" if self.bias else "")

    @property
    def gated(self) -> bool:
        """True if the result is that of a gated activation."""
        return False

    @property
    def slack(self) -> int:
        return self.in_width

    def weight_bytes(self, itemsize: float) -> float:
        """Return the bytes of the weight, with its scales."""
        return itemsize * self.in_width * self.out_width

    def weight_itemsize(self, itemsize: float) -> float:
        """Return the bytes of one of its numbers."""
        return self.weight_bytes(itemsize) / (self.in_width * self.out_width)

    def cost(self, itemsize: int) -> Cost:
        return linear_cost(
            self.tokens, self.in_width, self.out_width, itemsize=itemsize,
            weight_itemsize=self.weight_itemsize(itemsize), bias=self.bias,
        )  # fmt: skip


class NormedProductCase(ProductCase):
    """The same with a norm, a residual and a gate. It stands in front of the case of the product alone."""

    epsilons: ClassVar[int] = 32

    @property
    def label(self) -> str:
        return f"{self.shape} {self.gate or 'norm'}"

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def result_width(self) -> int:
        return self.out_width // (2 if self.gate else 1)

    @property
    def slack(self) -> int:
        return 2 * super().slack

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        x_TI, weight, bias_O = super().inputs(dtype, device, seed)  # type: ignore[safe-super, call-arg]
        norm_I = torch.linspace(0.5, 1.5, x_TI.shape[1], device=x_TI.device).to(x_TI.dtype)
        return Operand(x_TI, x_TI.flip(0), norm_I, 1e-5), weight, Epilogue(bias_O, self.gate)

    def cost(self, itemsize: int) -> Cost:
        return norm_linear_cost(
            self.tokens, self.in_width, self.result_width, itemsize=itemsize,
            weight_itemsize=self.weight_itemsize(itemsize), bias=self.bias, gate=self.gate,
        )  # fmt: skip


@dataclass(frozen=True)
class LinearCase(ProductCase):
    """A case of `linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return random inputs, with weights scaled so that outputs have a standard deviation of about one."""
        made = generator(device, seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        weight_OI = (normal(self.out_width, self.in_width) * self.in_width**-0.5).to(dtype)
        return x_TI, weight_OI, normal(self.out_width).to(dtype) if self.bias else None


@dataclass(frozen=True)
class NormLinearCase(OpCase):
    """A case of `norm_linear` for tests and benchmarks.

    out_width: the columns of the result. The weight has twice as many rows if the op is gated.
    norm_float32: the norm's weight is float32, whatever the activations are.
    norm: False: there is no norm.
    """

    epsilons: ClassVar[int] = 16

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False
    residual: bool = True
    gate: str | None = None
    eps: float = 1e-6
    norm_float32: bool = False
    norm: bool = True

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Operand, Tensor, Epilogue]:
        """Return random inputs, with a norm weight around one."""
        generator = torch.Generator(device).manual_seed(seed)
        rows = self.out_width * (2 if self.gate else 1)
        x_TI, weight_OI, bias_O = LinearCase(self.tokens, self.in_width, rows, self.bias).inputs(dtype, device, seed)
        residual_TI = torch.randn(x_TI.shape, generator=generator, device=device).to(dtype) if self.residual else None
        norm_weight_I = 1 + 0.3 * torch.randn(self.in_width, generator=generator, device=device)
        norm_weight_I = norm_weight_I.to(torch.float32 if self.norm_float32 else dtype)
        operand = Operand(x_TI, residual_TI, norm_weight_I if self.norm else None, self.eps)
        return operand, weight_OI, Epilogue(bias_O, self.gate)

    @property
    def label(self) -> str:
        shape = f"{self.tokens}x{self.out_width}x{self.in_width} {self.gate or ''}".rstrip()
        return shape + (" bias" if self.bias else "")

    @property
    def slack(self) -> int:
        return 16 * self.in_width

    def cost(self, itemsize: int) -> Cost:
        return norm_linear_cost(
            self.tokens, self.in_width, self.out_width, itemsize=itemsize, bias=self.bias, residual=self.residual,
            gate=self.gate,
        )  # fmt: skip


CASES = (
    LinearCase(1, 64, 64),
    LinearCase(1, 200, 48),
    LinearCase(3, 64, 192, bias=True),
    LinearCase(2, 1032, 36),
    LinearCase(7, 36, 20),
    LinearCase(8, 1024, 72),
    LinearCase(17, 768, 2304, bias=True),
    LinearCase(1, 4096, 192),
    LinearCase(256, 1024, 3072),
)


NORM_CASES = (
    NormLinearCase(1, 64, 64, residual=False),
    NormLinearCase(1, 1024, 24, gate="silu"),
    NormLinearCase(2, 200, 48, bias=True),
    NormLinearCase(3, 96, 36, bias=True, gate="gelu", eps=0.5),
    NormLinearCase(7, 36, 20),
    NormLinearCase(8, 640, 72, gate="silu"),
    NormLinearCase(17, 328, 72, bias=True, gate="gelu_tanh"),
    NormLinearCase(2, 328, 72, gate="gelu_tanh", norm_float32=True),
    NormLinearCase(1, 1032, 40, norm_float32=True),
    NormLinearCase(40, 512, 48, residual=False),
    NormLinearCase(300, 64, 64, gate="silu"),
    NormLinearCase(1, 1024, 24, gate="silu", residual=False, norm=False),
    NormLinearCase(3, 96, 36, bias=True, gate="gelu", norm=False),
    NormLinearCase(40, 512, 48, gate="silu", residual=False, norm=False),
)

# (inputs, outputs) of qkv, output, gate_up and down projections of an 8B model, gate_up of a 1B model
PROJECTIONS = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096), (2048, 16_384))

# Those of an 8B model by the op that runs them: (inputs, outputs), and the gate of those with a norm
ALONE, NORMED = ((4096, 4096), (14_336, 4096)), ((4096, 6144, None), (4096, 28_672, "silu"))

OP_CASES = {
    "linear": Cases(
        CASES,
        [LinearCase(t, i, o) for i, o in PROJECTIONS for t in (1, 8, 64, 256, 8192)]
        + [LinearCase(t, 4096, 128_256) for t in (1, 64)],
    ),
    "norm_linear": Cases(
        NORM_CASES,
        [NormLinearCase(t, i, o, gate="silu") for i, o in ((4096, 14_336), (1024, 3072)) for t in (1, 8, 64)],
    ),
}
