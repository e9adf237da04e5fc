"""A block of weights that several layers share, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import AttentionSpec, MLPSpec, NormSpec, Product, Products, RopeSpec
from ridgeline.core.specs.state import KVSpec, RecurrentSpec


@dataclass(frozen=True, kw_only=True)
class SharedBlockSpec:
    """A mixer of Mamba-2 to whose input something is added: link(block(x, e)), where x is the residual, e the tokens as
    they were embedded, and the block mlp(norm(attention(norm(x | e)))) (Zamba2, arXiv 2411.15242).

    Layers with equal numbers of the block share its weights. Each of them has adapters of its own, which are products
    of two thin matrices that are added to the block's.

    block: the number of the block.
    owner: this is the first layer that has it.
    width: of the model. The attention reads twice as much.
    norm: of both norms in the block.
    rank: of the adapters.
    adapts_attention: q, k and v have adapters, beside the feed-forward.
    """

    kind: ClassVar[str] = "shared_block"
    block: int
    owner: bool
    width: int
    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    rank: int
    adapts_attention: bool
    mamba: Mamba2Spec

    @property
    def rope(self) -> RopeSpec | None:
        return self.attention.rope

    @property
    def states(self) -> tuple[KVSpec, RecurrentSpec]:
        return (*self.attention.states, *self.mamba.states)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        own = ((self.norm, 2 * self.width), (self.norm, self.width)) if self.owner else ()
        return (*own, *self.mamba.norms)

    @property
    def vectors(self) -> int:
        return self.mamba.vectors

    @property
    def summed(self) -> tuple[int, ...]:
        return (self.width, self.width, *self.mamba.summed)

    @property
    def scratch(self) -> int:
        return 4 * self.width + max(self.attention.scratch, self.mlp.scratch, self.mamba.scratch)

    def products(self, width: int) -> Products:
        attention, mlp, copies, rank = self.attention, self.mlp, int(self.owner), self.rank
        found: Products = {"block.attention.qkv": Product(2 * width, sum(attention.projected), copies=copies)}
        if self.adapts_attention:
            found["qkv_adapter.down"] = Product(2 * width, len(attention.projected) * rank)
            for index, outputs in enumerate(attention.projected):
                found[f"qkv_adapter.up.{index}"] = Product(rank, outputs)
        return found | {
            "block.attention.out": Product(attention.q_size, width, copies=copies),
            "block.mlp.gate_up": Product(width, 2 * mlp.intermediate_size, mlp.bias, copies=copies),
            "mlp_adapter.down": Product(width, rank),
            "mlp_adapter.up.0": Product(rank, 2 * mlp.intermediate_size),
            "block.mlp.down": Product(mlp.intermediate_size, width, mlp.bias, copies=copies),
            "link": Product(width, width),
            **self.mamba.products(width),
        }

    def part(self, ranks: Ranks) -> SharedBlockSpec:
        attention, mlp, mamba = self.attention.part(ranks), self.mlp.part(ranks), self.mamba.part(ranks)
        return replace(self, attention=attention, mlp=mlp, mamba=mamba)
