"""Inputs of single layers: besides the residual, each layer gets some numbers of its own for every token (Gemma 3n).

Legend:
    T  tokens of the step
    M  model width
    L  layers
    P  width of a layer's input
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.model import LayerInputsSpec, ModelSpec, NormSpec
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.given import GivenVectors
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class LayerInputs(nn.Module):
    """The inputs of all layers: (norm(a projection of the embedded token) + the row of one more table) / sqrt(2).

    own: the spec of this rank's part, which has a part of the table's rows.
    """

    def __init__(self, own: ModelSpec, inputs: LayerInputsSpec, build: Build) -> None:
        super().__init__()
        self.spec, self._layers = inputs, len(own.layers)
        columns = self._layers * inputs.width
        self.table = Embedding(inputs.rows, columns, build, build.mesh.tp)
        self.project = Linear(own.hidden_size, (columns,), False, build.within("project"))
        self.norm = Norm(inputs.norm, inputs.width, build)
        self._known = inputs.known
        self._scale = own.hidden_size**-0.5
        # Rounded to the dtype, as in training
        self._table_scale = torch.tensor(inputs.width**0.5).to(build.dtype).item()

    def forward(self, token_ids_T: Tensor, x_TM: Tensor, given: GivenVectors | None = None) -> Tensor:
        """Return the inputs of embedded tokens: [T, L, P]. given: those that came as vectors."""
        known_T = torch.where(token_ids_T < self._known, token_ids_T, 0)
        if given is not None:
            known_T = given.marked(known_T, self.spec.given)
        rows_TLP = self.table(known_T).unflatten(-1, (self._layers, -1)) * self._table_scale
        made_TLP = (self.project(x_TM) * self._scale).unflatten(-1, (self._layers, -1))
        return (self.norm(made_TLP.contiguous())[0] + rows_TLP) * 2**-0.5


class LayerInput(nn.Module):
    """The part of a layer that reads its input: norm(project(act(gate(x)) * input))."""

    def __init__(self, inputs: LayerInputsSpec, norm: NormSpec, width: int, build: Build) -> None:
        super().__init__()
        self.ops, self.kind = build.ops, inputs.activation
        self.input_gate = Linear(width, (inputs.width,), False, build.within("input_gate"))
        self.input_project = Linear(inputs.width, (width,), False, build.within("input_project"))
        self.input_norm = Norm(norm, width, build)

    def forward(self, x_TM: Tensor, input_TP: Tensor) -> Tensor:
        """Return the addend of the residual x: [T, M]."""
        y_TP = self.ops.activation(self.input_gate(x_TM), self.kind) * input_TP
        return self.input_norm(self.input_project(y_TP))[0]
