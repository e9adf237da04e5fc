"""Cases of Mamba-2's scan, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of
from ridgeline.kernels.scans.ssd.cost import ssd_cost
from ridgeline.kernels.scans.ssd.op import SsdInputs


@dataclass(frozen=True)
class SsdCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    heads: H. groups: G. head_width: P. state_width: S.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    dt_min, dt_max: bounds of a token's step.
    fast: so many times faster than usual states are forgotten.
    """

    rows: tuple[int, ...]
    heads: int = 4
    groups: int = 1
    head_width: int = 16
    state_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    dt_min: float = 0.0
    dt_max: float = float("inf")
    fast: float = 1.0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[SsdInputs, Tensor, ScanMetadata]:
        """x, b and c are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        tokens, heads, shared = metadata.num_tokens, self.heads, self.groups * self.state_width
        x, b, c = normal(tokens, heads * self.head_width + 2 * shared).to(dtype).split(
            (heads * self.head_width, shared, shared), dim=1
        )  # fmt: skip
        states_NHPS = normal(3 * metadata.num_rows + 2, heads, self.head_width, self.state_width)
        states_NHPS[metadata.reads_R[metadata.fresh_R]] = torch.nan
        rate_H = -self.fast * torch.linspace(1, 16, heads, device=device)
        given = SsdInputs(
            x.unflatten(1, (heads, -1)), normal(tokens, heads).to(dtype), rate_H,
            b.unflatten(1, (self.groups, -1)), c.unflatten(1, (self.groups, -1)),
            normal(heads), normal(heads) - 3, self.dt_min, self.dt_max,
        )  # fmt: skip
        return given, states_NHPS, metadata

    @property
    def shape(self) -> str:
        return f"heads {self.heads}/{self.groups} {self.head_width}x{self.state_width}"

    def cost(self, itemsize: int) -> Cost:
        return ssd_cost(
            *self.counts, heads=self.heads, groups=self.groups, head_width=self.head_width,
            state_width=self.state_width, itemsize=itemsize,
        )  # fmt: skip


CASES = (
    SsdCase((1,)),
    SsdCase((1, 1, 1), heads=6, groups=3, fresh=(1,), dt_max=0.1),
    SsdCase((5, 1, 0, 130, 2), groups=2, marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    SsdCase((70, 3, 1, 65), heads=2, head_width=32, state_width=16, marks=(70, 1, 0, 30), fresh=(1,), fast=30.0),
    SsdCase((300,), heads=2, state_width=64, dt_min=0.01),
)

LAYERS = (  # Codestral-Mamba-7B, Mamba-2 of one group, Falcon-H1
    SsdCase((1,), heads=128, groups=8, head_width=64, state_width=128),
    SsdCase((1,), heads=128, groups=1, head_width=64, state_width=128),
    SsdCase((1,), heads=32, groups=2, head_width=64, state_width=256),
)

OP_CASES = {"ssd": cases_of_layers(CASES, *LAYERS)}
