"""Multi-head latent attention.

Legend:
    T  tokens of the step
    M  model width
    H  heads
    K  width of a query's part that is not rotated
    Y  width of the rotated part
    V  width of a value
    J  cached tokens
    L  width of a latent
    W  L + Y, the numbers that are kept of a token
    X  columns of queries, or what they are made of
    Z  rows of the table of angles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.build import Build
from ridgeline.layers.indexer import Index, Indexer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.rotary import grown


@dataclass(frozen=True)
class Latents:
    """A layer's ways with latents and rotated parts.

    weight_L: of the latents' norm. cos_sin_ZY: the table of angles; where nothing rotates, one row of no angle.
    expand: the projections of the heads.
    """

    spec: LatentAttentionSpec
    ops: Ops
    weight_L: Tensor
    cos_sin_ZY: Tensor
    expand: Expand

    def angles(self, positions_T: Tensor) -> Tensor:
        """Return the row of each token in the table."""
        return positions_T if self.spec.rope is not None else torch.zeros_like(positions_T)


class AttendsToLatents(Protocol):
    """The state of one layer of latent attention: what it keeps of earlier tokens."""

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Normalise and rotate the step's latents, keep them, and attend to all that is kept. Returns the heads'
        values, [T, H V].

        q_THX: queries as they were projected, the rotated part last.
        index: its keys are kept too, and tokens attend to those that it chooses, or has chosen for an earlier layer.
        """


class Expand(nn.Module):
    """The projections of latents to the heads' keys and values. The weight is [H (K + V), L], head by head, in plain
    numbers whatever the files hold, since either side is multiplied by it: queries and results, one head at a time, or
    the latents themselves."""

    fillings: ClassVar[tuple[()]] = ()

    def __init__(self, spec: LatentAttentionSpec, build: Build) -> None:
        super().__init__()
        self.ops, self._heads, self._sizes = build.ops, spec.num_heads, (spec.key_dim, spec.value_dim)
        self.inputs, self.parts = spec.rank, (spec.num_heads * sum(self._sizes),)
        self.weight = build.parameter(*self.parts, self.inputs)

    def queries(self, q_THK: Tensor) -> Tensor:
        """Return queries against the latents: [T, H, L]."""
        keys_HKL, _ = self._parts()
        return self.ops.head_linear(q_THK, keys_HKL.mT)

    def values(self, attended_THL: Tensor) -> Tensor:
        """Return the heads' values of what was attended: [T, H V]."""
        _, values_HVL = self._parts()
        return self.ops.head_linear(attended_THL, values_HVL).flatten(1)

    def keys_and_values(self, latent_JL: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return some heads' keys, without the rotated part, and values of latents: [J, H, K] and [J, H, V], parts of
        one tensor."""
        weight = self.weight.unflatten(0, (self._heads, -1))[heads].flatten(0, 1)
        kv_JHX = self.ops.linear(latent_JL, weight, None).unflatten(1, (-1, sum(self._sizes)))
        k_JHK, v_JHV = kv_JHX.split(self._sizes, dim=-1)
        return k_JHK, v_JHV

    def _parts(self) -> tuple[Tensor, ...]:
        return self.weight.unflatten(0, (self._heads, -1)).split(self._sizes, dim=1)


class LatentAttention(nn.Module):
    """The mixer of a `LatentAttentionSpec`, with one product to queries, or what they are made of, c and r."""

    still_1Y: Tensor

    def __init__(self, spec: LatentAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.latent_in = Linear(width, spec.projected, spec.bias, build.within("latent_in"), pending=build.pending)
        self.query_norm = self.query = None
        if spec.query_rank:
            self.query_norm = Norm(spec.norm, spec.query_rank, build)
            self.query = Linear(spec.query_rank, (spec.query_size,), False, build.within("query"))
        index = spec.own_indexer
        self.indexer = None if index is None else Indexer(index, width, spec.query_rank, build)
        self.latent_norm = Norm(spec.norm, spec.rank, build)
        self.expand = Expand(spec, build)
        self.rotary = None if spec.rope is None else build.rotary(spec.rope)
        if self.rotary is None:
            still_1Y = torch.tensor([[1.0, 0.0]], device=build.device).repeat_interleave(spec.rope_dim // 2, dim=1)
            self.register_buffer("still_1Y", still_1Y, persistent=False)
        self.out = Linear(spec.num_heads * spec.value_dim, (width,), spec.bias, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: AttendsToLatents
    ) -> tuple[Tensor, Tensor]:
        """Return (what attention adds to the residual, the residual before it): [T, M] each."""
        spec = self.spec
        index: Index | None = None
        if self.indexer is None or self.query is None:
            y_TX, residual_TM = self.latent_in.normed(norm, x_TM, residual_TM)
            q_TX, latent_TW = y_TX.split(spec.projected, dim=-1)
            if self.query is not None:
                q_TX, _ = self.query.normed(self.query_norm, q_TX, None)
        else:
            n_TM, residual_TM = self.latent_in.normed_input(norm, x_TM, residual_TM)
            q_TX, latent_TW = self.latent_in(n_TM).split(spec.projected, dim=-1)
            q_TX, _ = self.query.normed_input(self.query_norm, q_TX, None)
            index = self.indexer(n_TM, q_TX)
            q_TX = self.query(q_TX)
        if spec.growth is not None:
            q_TX = grown(q_TX, positions_T, spec.growth)
        q_THX = q_TX.unflatten(-1, (spec.num_heads, -1))
        table_ZY = self.still_1Y if self.rotary is None else self.rotary.cos_sin_ZY
        weight_L = self.latent_norm.weight if spec.latent_scale == 1 else self.latent_norm.weight * spec.latent_scale
        latents = Latents(spec, self.ops, weight_L, table_ZY, self.expand)
        return self.out(state.attend_to_latents(q_THX, latent_TW, positions_T, latents, index)), residual_TM
