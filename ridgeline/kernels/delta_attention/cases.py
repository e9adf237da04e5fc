"""Cases of Kimi's delta attention, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.core.cost import Cost
from ridgeline.kernels.case import Cases
from ridgeline.kernels.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.recurrent_case import REAL_ROWS, RecurrentCase, unpadded
from ridgeline.kernels.turns import Turns, turns_of


@dataclass(frozen=True)
class DeltaAttentionCase(RecurrentCase):
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    alike: how much the keys of a row have in common: 0: nothing, 1: they are all the same.
    slow: this is added to the logarithms of the rates.
    """

    rows: tuple[int, ...]
    heads: int = 2
    key_width: int = 32
    value_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    alike: float = 0.0
    slow: float = -1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Turns, float]:
        """Queries, keys and values are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        heads, keys, values = self.heads, self.heads * self.key_width, self.heads * self.value_width
        x_TX = normal(turns.num_tokens, 2 * keys + values)
        x_TX[:, keys : 2 * keys].mul_((1 - self.alike**2) ** 0.5).add_(self.alike * normal(keys))
        x_TX[sum(self.rows) :] = torch.nan
        q, k, v = (x.unflatten(1, (heads, -1)) for x in x_TX.to(dtype).split((keys, keys, values), dim=1))
        a_THK, b_TH = normal(turns.num_tokens, heads, self.key_width).to(dtype), normal(turns.num_tokens, heads)
        log_rate_H, dt_bias_HK = normal(heads) + self.slow, normal(heads, self.key_width)
        states_NHKV = normal(3 * len(self.rows) + 2, heads, self.key_width, self.value_width)
        states_NHKV[torch.cat((turns.reads_R[turns.fresh_R], turns.reads_R.new_zeros(1)))] = torch.nan
        return (
            q, k, v, a_THK, b_TH.to(dtype), log_rate_H, dt_bias_HK, states_NHKV, turns, self.key_width**-0.5,
        )  # fmt: skip

    @property
    def shape(self) -> str:
        return f"heads {self.heads} {self.key_width}x{self.value_width}"

    def cost(self, itemsize: int) -> Cost:
        decays = self.heads * (self.key_width + 1)  # and what decides how much a token changes
        return linear_attention_cost(
            self.rows, heads=self.heads, key_width=self.key_width, value_width=self.value_width, delta=True,
            itemsize=itemsize, decay_bytes=itemsize * decays,
        )  # fmt: skip


CASES = (
    DeltaAttentionCase((1,)),
    DeltaAttentionCase((1, 1, 1), heads=1, key_width=16, fresh=(1,)),
    DeltaAttentionCase((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    DeltaAttentionCase((70, 3, 1, 65), heads=1, marks=(70, 1, 0, 30), fresh=(1,), alike=0.9),
    DeltaAttentionCase((90,), heads=1, key_width=64, value_width=16, alike=1.0, slow=2.0),
)

OP_CASES = {
    "delta_attention": Cases(
        unpadded(CASES), [DeltaAttentionCase(rows, heads=32, key_width=128, value_width=128) for rows in REAL_ROWS]
    )
}
