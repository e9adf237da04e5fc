"""Medusa's heads (`core.specs.draft_head.MedusaSpec`).

Legend:
    T  tokens that are scored
    M  model width
    V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.draft_head import MedusaSpec
from ridgeline.layers.build import Build
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.quantization.scheme import everywhere, scheme


class MedusaHead(nn.Module):
    """Products that add to their input, and an output matrix if the head has its own."""

    def __init__(self, spec: MedusaSpec, build: Build) -> None:
        super().__init__()
        width = spec.width
        blocks = (Linear(width, (width,), spec.bias, build.within(f"blocks.{i}")) for i in range(spec.blocks))
        self.blocks = nn.ModuleList(blocks)
        self.unembed = Linear(width, (spec.scored,), False, build.within("unembed")) if spec.scored else None

    def forward(self, x_TM: Tensor) -> Tensor:
        """Return the head's own hidden states: [T, M]."""
        for block in self.blocks:
            x_TM = x_TM + nn.functional.silu(block(x_TM))
        return x_TM


class Medusa(nn.Module):
    """All heads. Their parameters are uninitialised."""

    def __init__(self, spec: MedusaSpec, target: Decoder, *, dtype: torch.dtype) -> None:
        super().__init__()
        device = next(target.parameters()).device
        build = Build(target.ops, dtype, device, everywhere(scheme(None)))
        self.spec, self._target = spec, (target,)  # in a tuple, so that its parameters are not this module's
        self.heads = nn.ModuleList(MedusaHead(spec, build.within(f"heads.{head}")) for head in range(spec.heads))

    @property
    def target(self) -> Decoder:
        return self._target[0]

    @property
    def tp(self) -> Axis:
        """The ranks that divide the vocabulary that is scored. All of them have the rest of the heads."""
        return ALONE if self.spec.scored else self.target.tp

    def prepare(self) -> None:
        """Make the loaded weights ready to multiply."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, without the target's."""
        prepared = (module.prepared_bytes for module in self.modules() if isinstance(module, Linear))
        return sum(p.nbytes for p in self.parameters()) + sum(prepared)

    def scores(self, head: int, x_TM: Tensor) -> Tensor:
        """Return one head's scores behind tokens of which the target's final norm returned x: [T, V], or this rank's
        part of them."""
        own: MedusaHead = self.heads[head]  # type: ignore[assignment]
        h_TM = own(x_TM)
        return self.target.scored(h_TM) if own.unembed is None else own.unembed(h_TM)
