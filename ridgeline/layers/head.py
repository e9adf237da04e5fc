"""The maps behind the pooling of hidden states: those of classifiers, and dense layers of embedding models.

Legend:
    R  pooled vectors, or tokens
    M  width of a vector
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.specs.model import NormSpec
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class HeadMap(nn.Module):
    """One map, with the activation and the norm behind it."""

    def __init__(self, spec: HeadSpec, width: int, build: Build, table: nn.Parameter | None) -> None:
        super().__init__()
        self.ops, self.kind = build.ops, spec.activation
        tied = table if spec.tied else None
        self.dense = Linear(width, (spec.outputs,), not spec.biasless, build.within("dense"), tied=tied)
        self.norm: Norm | None = None
        if spec.norm_eps is not None:
            norm = NormSpec(kind="layer", eps=spec.norm_eps, biasless=spec.norm_biasless)
            self.norm = Norm(norm, spec.outputs, build)

    def forward(self, x_RM: Tensor, weight_OM: Tensor | None = None, bias_O: Tensor | None = None) -> Tensor:
        """Return the map's outputs. weight_OM, bias_O: plain numbers in place of its own."""
        bias_O = self.dense.bias if bias_O is None else bias_O
        x_RM = self.dense.matrix.linear(x_RM, bias_O) if weight_OM is None else F.linear(x_RM, weight_OM, bias_O)
        match self.kind:
            case "none":
                pass
            case "tanh":
                x_RM = torch.tanh(x_RM)
            case "relu":
                x_RM = torch.relu(x_RM)
            case "log1p_relu":
                x_RM = torch.log1p(torch.relu(x_RM))
            case "log1p_log1p_relu":
                x_RM = torch.log1p(torch.log1p(torch.relu(x_RM)))
            case _:
                x_RM = self.ops.activation(x_RM, self.kind)
        return x_RM if self.norm is None else self.norm(x_RM)[0]


class Head(nn.Module):
    """All maps of a model, one behind the other. table: that of the tokens, which some maps share."""

    def __init__(self, spec: PoolingSpec, width: int, build: Build, table: nn.Parameter | None = None) -> None:
        super().__init__()
        self.maps = nn.ModuleList()
        for index, each in enumerate(spec.head):
            self.maps.append(HeadMap(each, width, build.within(f"maps.{index}"), table))
            width = each.outputs

    def forward(self, x_RM: Tensor, others: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the pooled vectors after the maps. others: parameters in place of these of their names."""
        for index, each in enumerate(self.maps):
            if others:
                x_RM = each(x_RM, *(others.get(f"maps.{index}.dense.{kind}") for kind in ("weight", "bias")))
            else:
                x_RM = each(x_RM)
        return x_RM
