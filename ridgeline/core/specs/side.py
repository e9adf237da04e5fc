"""Two mixers in one layer as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import AttentionSpec, NormSpec, Product, Products, RopeSpec
from ridgeline.core.specs.state import KVSpec, RecurrentSpec


@dataclass(frozen=True, kw_only=True)
class SideBySideSpec:
    """Attention beside a mixer of Mamba-2: both read the same input, and what they add is added up (Falcon-H1,
    arXiv 2507.22448).

    multipliers: those of q, k, v, z, x, b, c and dt.
    out_multipliers: those of what the attention and the other mixer add.
    """

    kind: ClassVar[str] = "side_by_side"
    attention: AttentionSpec
    mamba: Mamba2Spec
    multipliers: tuple[float, ...] = (1.0,) * 8
    out_multipliers: tuple[float, float] = (1.0, 1.0)

    @property
    def rope(self) -> RopeSpec | None:
        return self.attention.rope

    @property
    def states(self) -> tuple[KVSpec, RecurrentSpec]:
        return (*self.attention.states, *self.mamba.states)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        return (*self.attention.norms, *self.mamba.norms)

    @property
    def vectors(self) -> int:
        return self.attention.vectors + self.mamba.vectors

    @property
    def summed(self) -> tuple[int, ...]:
        return self.mamba.summed

    @property
    def scratch(self) -> int:
        return self.attention.scratch + self.mamba.scratch

    def products(self, width: int) -> Products:
        attention, mamba = self.attention, self.mamba
        return {
            "both_in": Product(width, sum(self.projected), attention.qkv_bias),
            "attention.out": Product(attention.q_size, width, attention.out_bias),
            "mamba.out": Product(mamba.inner, width, mamba.out_bias),
        }

    def part(self, ranks: Ranks) -> SideBySideSpec:
        return replace(self, attention=self.attention.part(ranks), mamba=self.mamba.part(ranks))

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the tensors that make up the fused projection: q, k, v, and the other mixer's all together."""
        return *self.attention.projected, self.mamba.projected

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of q, k, v, z, x, b, c and dt."""
        return *self.attention.projected, *self.mamba.columns
