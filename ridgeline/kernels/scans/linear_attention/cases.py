"""Cases of linear attention, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.scans.linear_attention.op import LinearInputs
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of


@dataclass(frozen=True)
class LinearAttentionCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    decay: what has a decay of its own.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    fast: the size of the decays.
    """

    rows: tuple[int, ...]
    heads: int = 2
    key_width: int = 32
    value_width: int = 32
    decay: Literal["channel", "token", "head"] = "channel"
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    fast: float = 0.1

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[LinearInputs, Tensor, ScanMetadata]:
        """Queries, keys and values are views of one tensor, as a projection leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        x_TX = normal(metadata.num_tokens, 2 * keys + values)
        x_TX[sum(self.rows) :] = torch.nan
        q, k, v = (x.unflatten(1, (self.heads, -1)) for x in x_TX.to(dtype).split((keys, keys, values), dim=1))
        shape = (metadata.num_tokens, self.heads, self.key_width)
        decay = -self.fast * normal(*{"channel": shape, "token": shape[:2], "head": shape[1:2]}[self.decay]).exp()
        states_NHKV = normal(3 * len(self.rows) + 2, *shape[1:], self.value_width)
        states_NHKV[torch.cat((metadata.reads_R[metadata.fresh_R], metadata.reads_R.new_zeros(1)))] = torch.nan
        return LinearInputs(q, k, v, decay, self.key_width**-0.5), states_NHKV, metadata

    @property
    def shape(self) -> str:
        return f"heads {self.heads} {self.key_width}x{self.value_width} by {self.decay}"

    def cost(self, itemsize: int) -> Cost:
        decays = {"channel": self.heads * self.key_width, "token": self.heads, "head": 0}[self.decay]
        return linear_attention_cost(
            self.rows, heads=self.heads, key_width=self.key_width, value_width=self.value_width, itemsize=itemsize,
            decay_bytes=4.0 * decays,
        )  # fmt: skip


CASES = (
    LinearAttentionCase((1,)),
    LinearAttentionCase((1, 1, 1), heads=1, key_width=16, fresh=(1,), decay="head"),
    LinearAttentionCase((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    LinearAttentionCase((70, 3, 1, 65), heads=1, decay="token", marks=(70, 1, 0, 30), fresh=(1,)),
    LinearAttentionCase((40,), heads=3, key_width=24, value_width=16, decay="head", fast=0.02),
    LinearAttentionCase((90,), heads=1, key_width=64, value_width=48, fast=3.0),
)

LAYERS = (  # GLA-1.3B, RetNet
    LinearAttentionCase((1,), heads=4, key_width=256, value_width=512),
    LinearAttentionCase((1,), heads=16, key_width=128, value_width=256, decay="head"),
)

OP_CASES = {"linear_attention": cases_of_layers(CASES, *LAYERS)}
