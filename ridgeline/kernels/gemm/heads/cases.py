"""Cases of products of heads, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost


@dataclass(frozen=True)
class HeadLinearCase(OpCase):
    """A case for tests and benchmarks. backwards: the outputs of a matrix lie side by side, and not its inputs."""

    tokens: int
    heads: int
    in_width: int
    out_width: int
    backwards: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs. x is a view of wider heads."""
        generator = torch.Generator().manual_seed(seed)
        x_THI = torch.randn(self.tokens, self.heads, self.in_width + 16, generator=generator)
        shape = (self.in_width, self.out_width) if self.backwards else (self.out_width, self.in_width)
        weight = torch.randn(self.heads, *shape, generator=generator) * self.in_width**-0.5
        x_THI, weight = x_THI.to(device, dtype)[..., : self.in_width], weight.to(device, dtype)
        return x_THI, weight.mT if self.backwards else weight

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.heads}x{self.out_width}x{self.in_width}"

    @property
    def slack(self) -> int:
        return self.in_width

    def cost(self, itemsize: int) -> Cost:
        numbers = self.heads * (self.tokens * (self.in_width + self.out_width) + self.in_width * self.out_width)
        return Cost(numbers * itemsize, 2.0 * self.tokens * self.heads * self.in_width * self.out_width)


CASES = (
    HeadLinearCase(1, 4, 24, 32, backwards=True),
    HeadLinearCase(1, 4, 32, 20),
    HeadLinearCase(70, 3, 128, 512, backwards=True),
    HeadLinearCase(70, 3, 512, 128),
)

REAL = [
    HeadLinearCase(tokens, 16, *sizes, backwards=sizes[0] == 128)
    for tokens in (1, 64, 8192)
    for sizes in ((128, 512), (512, 128))
]

OP_CASES = {"head_linear": Cases(CASES, REAL)}
