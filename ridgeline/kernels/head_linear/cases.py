"""Cases of products of heads, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadLinearCase:
    """A case for tests and benchmarks. backwards: the outputs of a matrix lie side by side, and not its inputs."""

    tokens: int
    heads: int
    inputs: int
    outputs: int
    backwards: bool = False

    def inputs_of(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs. x is a view of wider heads."""
        generator = torch.Generator().manual_seed(seed)
        x_THI = torch.randn(self.tokens, self.heads, self.inputs + 16, generator=generator)
        shape = (self.inputs, self.outputs) if self.backwards else (self.outputs, self.inputs)
        weight = torch.randn(self.heads, *shape, generator=generator) * self.inputs**-0.5
        x_THI, weight = x_THI.to(device, dtype)[..., : self.inputs], weight.to(device, dtype)
        return x_THI, weight.mT if self.backwards else weight


CASES = (
    HeadLinearCase(1, 4, 24, 32, backwards=True),
    HeadLinearCase(1, 4, 32, 20),
    HeadLinearCase(70, 3, 128, 512, backwards=True),
    HeadLinearCase(70, 3, 512, 128),
)
