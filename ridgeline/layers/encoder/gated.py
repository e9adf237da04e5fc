"""The projector of GLM's towers: merged patches through a convolution, a map and a gated feed-forward.

Legend:
    T  patches
    W  width of the tower
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.core.specs.model import MLPSpec
from ridgeline.core.specs.tower import GatedProjectorSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import Norm


class GatedProjector(nn.Module):
    """The map of a `GatedProjectorSpec`."""

    def __init__(self, spec: GatedProjectorSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        outputs, mlp = spec.outputs, MLPSpec(intermediate_size=spec.hidden, activation=spec.activation)
        assert spec.norm is not None
        self.merger = Linear(width * spec.merge**2, (outputs,), True, build.within("merger"))
        self.mixed = Linear(outputs, (outputs,), False, build.within("mixed"))
        self.norm = Norm(spec.norm, outputs, build)
        self.mlp = GatedMLP(mlp, outputs, build.within("mlp"))

    def forward(self, x_TW: Tensor) -> Tensor:
        """Return [L, M] of patches [T, W], of which the ones that are merged follow each other."""
        squares = x_TW.unflatten(0, (-1, self.spec.merge**2))
        x_LM = self.mixed(self.merger(squares.transpose(1, 2).flatten(1)))
        x_LM = self.ops.activation(self.norm(x_LM)[0], "gelu")
        found_LM: Tensor = self.mlp(None, x_LM, None)[0]
        return found_LM
