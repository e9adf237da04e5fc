"""Cases of Mamba's selective scan, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of
from ridgeline.kernels.scans.selective_scan.cost import selective_scan_cost
from ridgeline.kernels.scans.selective_scan.op import ScanInputs


@dataclass(frozen=True)
class SelectiveScanCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    channels: X. state_width: S.
    gated: there is a z. bias: there is a bias of dt.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    fast: so many times faster than usual states are forgotten.
    """

    rows: tuple[int, ...]
    channels: int = 64
    state_width: int = 16
    gated: bool = True
    bias: bool = True
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    fast: float = 1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[ScanInputs, Tensor, ScanMetadata]:
        """b and c are views of one tensor, and so are x and z, as projections leave them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        tokens, channels, width = metadata.num_tokens, self.channels, self.state_width
        x_TX, z_TX = normal(tokens, 2 * channels).to(dtype).split(channels, dim=1)
        b_TS, c_TS = normal(tokens, 2 * width).to(dtype).split(width, dim=1)
        rate_XS = -self.fast * torch.arange(1, width + 1, device=device).float().repeat(channels, 1)
        states_NXS = normal(3 * metadata.num_rows + 2, channels, width)
        states_NXS[metadata.reads_R[metadata.fresh_R]] = torch.nan
        given = ScanInputs(
            x_TX, normal(tokens, channels).to(dtype), rate_XS, b_TS, c_TS, normal(channels),
            normal(channels) - 3 if self.bias else None, z_TX if self.gated else None,
        )  # fmt: skip
        return given, states_NXS, metadata

    @property
    def shape(self) -> str:
        return f"{self.channels}x{self.state_width}"

    def cost(self, itemsize: int) -> Cost:
        return selective_scan_cost(
            *self.counts, channels=self.channels, state_width=self.state_width, gated=self.gated, itemsize=itemsize
        )


CASES = (
    SelectiveScanCase((1,), channels=32),
    SelectiveScanCase((1, 1, 1), channels=96, gated=False, fresh=(1,)),
    SelectiveScanCase((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    SelectiveScanCase((70, 3, 1, 65), channels=40, bias=False, marks=(70, 1, 0, 30), fresh=(1,), fast=30.0),
    SelectiveScanCase((150,), channels=24, state_width=8),
)

LAYERS = (  # Falcon-Mamba-7B
    SelectiveScanCase((1,), channels=8192),
)

OP_CASES = {"selective_scan": cases_of_layers(CASES, *LAYERS)}
