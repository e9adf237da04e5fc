"""The one decoder: a `ModelSpec` as a network. Parameter names are what `WeightMap` keys name.

Legend: T tokens of all sequences of a step in a row, N tokens to score, M model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.model_spec import LayerSpec, ModelSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.attention import Attention, MixerState
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import feed_forward
from ridgeline.layers.norm import Norm
from ridgeline.layers.rotary import Rotary


class Layer(nn.Module):
    """A mixer and a feed-forward, each behind a norm. The residual addition happens inside the next norm."""

    def __init__(self, index: int, spec: LayerSpec, width: int, rotary: Rotary | None, build: Build) -> None:
        super().__init__()
        self.mixer_norm = Norm(spec.norm, width, build)
        self.mixer = Attention(index, spec.mixer, width, rotary, build)
        self.feed_forward_norm = Norm(spec.norm, width, build)
        self.feed_forward = feed_forward(spec.feed_forward, width, build)

    def forward(
        self, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: MixerState
    ) -> tuple[Tensor, Tensor]:
        """(what this layer adds to the residual, the residual before it)."""
        x_TM, residual_TM = self.mixer_norm(x_TM, residual_TM)
        x_TM = self.mixer(x_TM, positions_T, state)
        x_TM, residual_TM = self.feed_forward_norm(x_TM, residual_TM)
        return self.feed_forward(x_TM), residual_TM


class Decoder(nn.Module):
    """Parameters are uninitialised. `max_positions`: rows of the rotary table (default: the model's own maximum).

    Cast by building with another `dtype`, not with `.to(dtype)`, which would round the float32 rotary table.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        build = Build(ops, dtype, device)
        positions = max_positions or spec.max_position_embeddings
        ropes = {layer.mixer.rope for layer in spec.layers}
        rotaries = {rope: Rotary(rope, positions, build) if rope else None for rope in ropes}
        width = spec.hidden_size
        self.spec = spec
        self.ops = ops
        self.embed = Embedding(spec.vocab_size, width, build)
        self.position_embed = Embedding(spec.learned_positions, width, build) if spec.learned_positions else None
        self.layers = nn.ModuleList(
            Layer(index, layer, width, rotaries[layer.mixer.rope], build) for index, layer in enumerate(spec.layers)
        )
        self.final_norm = Norm(spec.final_norm, width, build)
        self.unembed = None if spec.tie_word_embeddings else Linear(width, (spec.vocab_size,), False, build)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, state: MixerState) -> Tensor:
        """Hidden states after the final norm: [T, M]."""
        x_TM = self.embed(token_ids_T)
        if self.position_embed is not None:
            x_TM = x_TM + self.position_embed(positions_T)
        residual_TM: Tensor | None = None
        for layer in self.layers:
            x_TM, residual_TM = layer(x_TM, residual_TM, positions_T, state)
        return self.final_norm(x_TM, residual_TM)[0]

    def logits(self, hidden_NM: Tensor) -> Tensor:
        """Scores of every vocabulary entry: [N, V] in the model's dtype."""
        if self.unembed is not None:
            return self.unembed(hidden_NM)
        return self.ops.linear(hidden_NM, self.embed.weight, None)
