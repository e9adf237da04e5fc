"""Cases of the short causal convolution, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.scans.causal_conv.op import ConvInputs
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of


@dataclass(frozen=True)
class ConvCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    """

    rows: tuple[int, ...]
    channels: int
    width: int = 4
    bias: bool = False
    activation: str | None = "silu"
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[ConvInputs, Tensor, ScanMetadata]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        bias_X = normal(self.channels) if self.bias else None
        tails_NwX = normal(3 * len(self.rows) + 2, self.width - 1, self.channels)
        tails_NwX[torch.cat((metadata.reads_R[metadata.fresh_R], metadata.reads_R.new_zeros(1)))] = torch.nan
        x_TX = normal(metadata.num_tokens, self.channels)
        x_TX[sum(self.rows) :] = torch.nan
        given = ConvInputs(x_TX, normal(self.channels, self.width), bias_X, self.activation)
        return given, tails_NwX, metadata

    @property
    def shape(self) -> str:
        return f"{self.channels} channels"

    def cost(self, itemsize: int) -> Cost:
        return causal_conv_cost(*self.counts, self.channels, self.width, itemsize=itemsize, bias=self.bias)


CASES = (
    ConvCase((1,), 32),
    ConvCase((1, 1, 1, 1), 96, bias=True, fresh=(2,)),
    ConvCase((5, 1, 0, 130, 2), 64, marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    ConvCase((70, 3, 1, 65), 40, width=3, bias=True, activation=None, marks=(70, 1, 0, 30), fresh=(1,)),
    ConvCase((2, 9), 8, width=2, marks=(1, 0)),
)

LAYERS = (ConvCase((1,), 8192),)  # Qwen3.5-9B

OP_CASES = {"causal_conv": cases_of_layers(CASES, *LAYERS)}
