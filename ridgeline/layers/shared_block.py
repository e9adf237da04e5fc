"""Mixers of Mamba-2 behind a block that layers share.

Legend:
    T  tokens of the step
    M  model width
    D  2 M, the residual and the embedded tokens beside each other
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ridgeline.core.specs.shared import SharedBlockSpec
from ridgeline.layers.attention import Attends, Attention
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.mamba2 import Mamba2
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import Recurs
from ridgeline.parallel.axis import ALONE


class Adapter(nn.Module):
    """Products of two thin matrices each, all of the same inputs: one for each of `parts`, which are the columns of
    their outputs (`Linear`)."""

    def __init__(self, inputs: int, rank: int, parts: Sequence[tuple[int, ...]], build: Build) -> None:
        super().__init__()
        self.down = Linear(inputs, (rank,) * len(parts), False, build.within("down"))
        ups = (
            Linear(rank, (sum(each),), False, build.within(f"up.{index}"), columns=each)
            for index, each in enumerate(parts)
        )
        self.up = nn.ModuleList(ups)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return the outputs beside each other: [T, O]."""
        thin = self.down(x_TI).split(self.down.parts, dim=-1)
        wide = [up(each) for up, each in zip(self.up, thin, strict=True)]
        return wide[0] if len(wide) == 1 else torch.cat(wide, dim=-1)


class SharedBlock(nn.Module):
    """The weights that layers share: attention, and a feed-forward of what it finds."""

    def __init__(self, spec: SharedBlockSpec, width: int, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.attention_norm = Norm(spec.norm, 2 * width, build)
        self.attention = Attention(spec.attention, width, build.within("attention"), inputs=2 * width)
        self.mlp_norm = Norm(spec.norm, width, build)
        self.mlp = GatedMLP(spec.mlp, width, build.within("mlp"))

    def forward(
        self, both_TD: Tensor, positions_T: Tensor, state: Attends, of_qkv: Adapter | None, of_mlp: Adapter
    ) -> Tensor:
        """Return the block's output for the residual and the embedded tokens, with one layer's adapters: [T, M]."""
        if of_qkv is None:
            qkv_TO, _ = self.attention.qkv.normed(self.attention_norm, both_TD, None)
        else:
            both_TD, _ = self.attention_norm(both_TD)
            qkv_TO = self.attention.qkv(both_TD) + of_qkv(both_TD)
        x_TM, _ = self.mlp_norm(self.attention.mixed(qkv_TO, positions_T, state))
        gate_up_TO = self.mlp.gate_up(x_TM) + of_mlp(x_TM)
        return self.mlp.down(self.ops.gated_activation(gate_up_TO, self.mlp.kind))


class BehindSharedBlock(Mamba2):
    """The mixer of a `SharedBlockSpec`."""

    def __init__(self, spec: SharedBlockSpec, width: int, build: Build) -> None:
        build = replace(build, pending=ALONE)  # what it reads is read in full (`LayerSpec.embedded`)
        super().__init__(spec.mamba, width, build)
        build = replace(build, sums=build.mesh.tp)
        block = build.shared(("shared block", spec.block), lambda: SharedBlock(spec, width, build.within("block")))
        self.block = block if spec.owner else None  # so that its parameters have one name
        self._block = (block,)
        attention, rank = spec.attention, spec.rank
        adapts = spec.adapts_attention
        thick = tuple((outputs,) for outputs in attention.projected)
        qkv = Adapter(2 * width, rank, thick, build.within("qkv_adapter")) if adapts else None
        self.qkv_adapter = qkv
        self.mlp_adapter = Adapter(width, rank, ((spec.mlp.intermediate_size,) * 2,), build.within("mlp_adapter"))
        self.link = Linear(width, (width,), False, build.within("link"))

    def forward(  # type: ignore[override]
        self,
        norm: Norm | None,
        x_TM: Tensor,
        residual_TM: Tensor | None,
        positions_T: Tensor,
        state: tuple[Attends, Recurs],
        embedded_TM: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        cached, kept = state
        [block] = self._block
        residual_TM = x_TM if residual_TM is None else x_TM + residual_TM
        both_TD = torch.cat((residual_TM, embedded_TM), dim=-1)
        found_TM = self.link(block(both_TD, positions_T, cached, self.qkv_adapter, self.mlp_adapter))
        zxbcdt_TX, _ = self.mamba_in.normed(norm, found_TM, residual_TM)
        return self.mixed(zxbcdt_TX, kept), residual_TM
