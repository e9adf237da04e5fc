"""Cases of RWKV's weighted mean, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of
from ridgeline.kernels.scans.wkv.cost import wkv_cost
from ridgeline.kernels.scans.wkv.op import WkvInputs


@dataclass(frozen=True)
class WkvCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with nothing.
    padding: tokens behind the last row's.
    large: the spread of the keys. The exponents of large ones overflow.
    """

    rows: tuple[int, ...]
    channels: int = 48
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    large: float = 1.0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[WkvInputs, Tensor, ScanMetadata]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        k_TX, v_TX = self.large * normal(metadata.num_tokens, self.channels), normal(metadata.num_tokens, self.channels)
        k_TX[sum(self.rows) :] = torch.nan
        decay_X, bonus_X = -(normal(self.channels) - 2).exp(), normal(self.channels)
        states_N3X = normal(3 * len(self.rows) + 2, 3, self.channels)
        states_N3X[:, 1] = states_N3X[:, 1].abs() + 1
        states_N3X[torch.cat((metadata.reads_R[metadata.fresh_R], metadata.reads_R.new_zeros(1)))] = torch.nan
        return WkvInputs(k_TX.to(dtype), v_TX.to(dtype), decay_X, bonus_X), states_N3X, metadata

    @property
    def shape(self) -> str:
        return f"{self.channels} channels"

    @property
    def slack(self) -> int:
        """The error of an exponent is a factor of its exponential."""
        return int(super().slack * max(1.0, self.large / 10))

    def cost(self, itemsize: int) -> Cost:
        return wkv_cost(*self.counts, self.channels, itemsize=itemsize)


CASES = (
    WkvCase((1,)),
    WkvCase((1, 1, 1), channels=96, fresh=(1,)),
    WkvCase((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    WkvCase((70, 3, 1, 65), channels=40, marks=(70, 1, 0, 30), fresh=(1,), large=50.0),
)

LAYERS = (  # RWKV-4-7B
    WkvCase((1,), channels=4096),
)

OP_CASES = {"wkv": cases_of_layers(CASES, *LAYERS)}
