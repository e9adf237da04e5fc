"""Linear maps of heads, each of which has a matrix of its own.

Legend:
    T  tokens
    H  heads
    I  inputs of a head
    O  outputs of a head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu


def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Return y[t, h] = weight[h] · x[t, h], in the dtype of x: [T, H, O], in which the outputs of a head lie side by
    side.

    x_THI, weight_HOI: views of any strides.
    """
    return torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)


@dataclass(frozen=True)
class Case:
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
    Case(1, 4, 24, 32, backwards=True),
    Case(1, 4, 32, 20),
    Case(70, 3, 128, 512, backwards=True),
    Case(70, 3, 512, 128),
)

HEAD_LINEAR = Op(
    "head_linear",
    head_linear,
    (
        Implementation("torch", "ridgeline.kernels.head_linear.torch_ops:head_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.head_linear.batch_invariant:head_linear", on_gpu),
    ),
)
