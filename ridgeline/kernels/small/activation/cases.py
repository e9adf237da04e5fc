"""Cases of activations, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.activation.cost import activation_cost


@dataclass(frozen=True)
class ActivationCase(OpCase):
    """A case for tests and benchmarks.

    width: the columns of the input, 2F if the op is gated.
    """

    tokens: int
    width: int
    kind: str

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, str]:
        """Return random inputs with a standard deviation of 3, and the kind."""
        generator = torch.Generator(device).manual_seed(seed)
        return (3 * torch.randn(self.tokens, self.width, generator=generator, device=device)).to(dtype), self.kind

    @property
    def label(self) -> str:
        return f"{self.kind} {self.tokens}x{self.width // 2}"

    @property
    def slack(self) -> int:
        return 16 * 16

    def cost(self, itemsize: int) -> Cost:
        return activation_cost(self.tokens, self.width // 2, kind=self.kind, itemsize=itemsize, gated=True)


CASES = tuple(
    ActivationCase(tokens, width, kind)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    for tokens, width in ((1, 64), (7, 352), (64, 6144))
)
GATED_CASES = (*CASES, *(ActivationCase(7, 352, kind) for kind in ("silu_clamped_7", "silu_clamped_16")))

OP_CASES = {
    "gated_activation": Cases(GATED_CASES, [ActivationCase(t, 28_672, "silu") for t in (1, 64, 256, 8192)]),
}
