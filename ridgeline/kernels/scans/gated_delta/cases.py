"""Cases of delta rules, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.scans.case import RecurrentCase, cases_of_layers
from ridgeline.kernels.scans.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of


@dataclass(frozen=True)
class DeltaCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    heads: query and key heads. value_heads: value heads.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    alike: how much the keys of a row have in common: 0: nothing, 1: they are all the same.
    slow: this is added to the logarithms of the rates.
    channels: every key channel has a decay of its own, as in delta attention.
    """

    rows: tuple[int, ...]
    heads: int = 2
    value_heads: int = 4
    key_width: int = 32
    value_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    alike: float = 0.0
    slow: float = -1.0
    channels: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[DeltaInputs, Tensor, ScanMetadata]:
        """Queries, keys and values are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        metadata = metadata_of(self.rows, device, self.marks, self.fresh, self.padding)
        keys, values = self.heads * self.key_width, self.value_heads * self.value_width
        x_TX = normal(metadata.num_tokens, 2 * keys + values)
        x_TX[:, keys : 2 * keys].mul_((1 - self.alike**2) ** 0.5).add_(self.alike * normal(keys))
        x_TX[sum(self.rows) :] = torch.nan
        q_TX, k_TX, v_TX = x_TX.to(dtype).split((keys, keys, values), dim=1)
        decays = (self.value_heads, self.key_width) if self.channels else (self.value_heads,)
        a, b_TG = (
            normal(metadata.num_tokens, *decays).to(dtype),
            normal(metadata.num_tokens, self.value_heads).to(dtype),
        )
        log_rate_G, dt_bias = normal(self.value_heads) + self.slow, normal(*decays)
        states_NGKV = normal(3 * len(self.rows) + 2, self.value_heads, self.key_width, self.value_width)
        states_NGKV[torch.cat((metadata.reads_R[metadata.fresh_R], metadata.reads_R.new_zeros(1)))] = torch.nan
        given = DeltaInputs(
            q_TX.unflatten(1, (self.heads, -1)), k_TX.unflatten(1, (self.heads, -1)),
            v_TX.unflatten(1, (self.value_heads, -1)), a, b_TG, log_rate_G, dt_bias, self.key_width**-0.5,
        )  # fmt: skip
        return given, states_NGKV, metadata

    @property
    def shape(self) -> str:
        heads = f"{self.heads}" if self.channels else f"{self.heads}/{self.value_heads}"
        return f"heads {heads} {self.key_width}x{self.value_width}"

    def cost(self, itemsize: int) -> Cost:
        widths: dict[str, Any] = {"key_width": self.key_width, "value_width": self.value_width, "itemsize": itemsize}
        if not self.channels:
            return gated_delta_cost(self.rows, heads=self.heads, value_heads=self.value_heads, **widths)
        decays = itemsize * self.heads * (self.key_width + 1)  # and what decides how much a token changes
        return linear_attention_cost(self.rows, heads=self.heads, **widths, delta=True, decay_bytes=decays)


def channel_case(rows: tuple[int, ...], heads: int = 2, **fields: Any) -> DeltaCase:
    """Return a case of delta attention."""
    return DeltaCase(rows, heads, heads, **fields, channels=True)


GATED_CASES = (
    DeltaCase((1,)),
    DeltaCase((1, 1, 1), heads=1, value_heads=3, key_width=16, fresh=(1,)),
    DeltaCase((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    DeltaCase((70, 3, 1, 65), heads=1, value_heads=1, marks=(70, 1, 0, 30), fresh=(1,), alike=0.9),
    DeltaCase((150,), heads=1, value_heads=2, key_width=64, value_width=16, alike=1.0),
)
CHANNEL_CASES = (
    channel_case((1,)),
    channel_case((1, 1, 1), heads=1, key_width=16, fresh=(1,)),
    channel_case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    channel_case((70, 3, 1, 65), heads=1, marks=(70, 1, 0, 30), fresh=(1,), alike=0.9),
    channel_case((90,), heads=1, key_width=64, value_width=16, alike=1.0, slow=2.0),
)

GATED_LAYERS = (  # Qwen3.5-9B, an eighth of a larger model's layer
    DeltaCase((1,), heads=16, value_heads=32, key_width=128, value_width=128),
    DeltaCase((1,), heads=2, value_heads=8, key_width=128, value_width=128),
)
CHANNEL_LAYERS = (channel_case((1,), heads=32, key_width=128, value_width=128),)  # Kimi Linear

OP_CASES = {
    "gated_delta": cases_of_layers(GATED_CASES, *GATED_LAYERS),
    "delta_attention": cases_of_layers(CHANNEL_CASES, *CHANNEL_LAYERS),
}
