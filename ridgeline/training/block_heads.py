"""A head that guesses a block of tokens at once (DFlash: Chen et al., arXiv 2602.06036), as a plain torch module over
whole sequences. Its parameters have the names of published checkpoints.

The outputs of some of the target's layers are joined to a context of each token. A block behind context i reads token
i + 1, which is its anchor, and a mask in the place of each token to come. All of its places see the contexts up to i
and each other, and each mask scores its own token.

    contexts                places of the block behind context 2
    0  1  2  3  4 …         t3   mask  mask
    x  x  x                 x     x     x      all three queries

Legend:
    B  sequences
    P  contexts
    C  blocks, by the contexts behind which they lie
    N  places of a block: the anchor and its masks
    H  query heads
    D  head width
    M  model width
    X  features of a token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.training.heads import EagleShape, FeedForward, RMSNorm, drawn, rotated


@dataclass(frozen=True, kw_only=True)
class BlockShape(EagleShape):
    """The sizes of a head. layers: its own. block: the places of a block. mask: the token that stands for those to
    come. target_layers: those of the target."""

    layers: int
    block: int
    mask: int
    target_layers: int

    def config(self) -> dict[str, Any]:
        """Return config.json as such heads are published."""
        eagles = super().config()
        for name in ("eagle_config", "draft_vocab_size", "tie_word_embeddings"):
            del eagles[name]
        return eagles | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "block_size": self.block,
            "num_target_layers": self.target_layers,
            "dflash_config": {"target_layer_ids": list(self.taps), "mask_token_id": self.mask},
        }


class _BlockAttention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, read_BCNM: Tensor, context_BPM: Tensor, starts_C: Tensor) -> Tensor:
        """Let each block attend to the contexts up to its start and to itself: [B, C, N, M]."""
        place_P = torch.arange(context_BPM.shape[1], device=starts_C.device)
        place_CN = starts_C[:, None] + 1 + torch.arange(read_BCNM.shape[2], device=starts_C.device)
        q_BHCND = self._rotated(self.q_norm(self._heads(self.q_proj, read_BCNM)), place_CN)
        q_BHCND = q_BHCND * self.shape.head_dim**-0.5
        k_BHPD, v_BHPD = self._keys_and_values(context_BPM, place_P)
        k_BHCND, v_BHCND = self._keys_and_values(read_BCNM, place_CN)
        seen_BHCNP = (q_BHCND.flatten(2, 3) @ k_BHPD.transpose(-1, -2)).unflatten(2, place_CN.shape).float()
        seen_BHCNP = seen_BHCNP.masked_fill((place_P > starts_C[:, None])[:, None], -torch.inf)
        own_BHCNN = (q_BHCND @ k_BHCND.transpose(-1, -2)).float()
        weights = torch.cat((seen_BHCNP, own_BHCNN), -1).softmax(-1).to(v_BHPD.dtype)
        seen_BHCNP, own_BHCNN = weights.split((len(place_P), place_CN.shape[1]), -1)
        mixed_BHCND = (seen_BHCNP.flatten(2, 3) @ v_BHPD).unflatten(2, place_CN.shape) + own_BHCNN @ v_BHCND
        out_BCNM: Tensor = self.o_proj(mixed_BHCND.permute(0, 2, 3, 1, 4).flatten(3))
        return out_BCNM

    def _keys_and_values(self, read: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values, once for each query head: [B, H, .., D]."""
        k = self._rotated(self.k_norm(self._heads(self.k_proj, read)), place)
        v, group = self._heads(self.v_proj, read), self.shape.heads // self.shape.kv_heads
        return k.to(v.dtype).repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _heads(self, project: nn.Module, read: Tensor) -> Tensor:
        heads: Tensor = project(read).unflatten(-1, (-1, self.shape.head_dim))
        return heads.movedim(-2, 1)

    def _rotated(self, x: Tensor, place: Tensor) -> Tensor:
        return rotated(x.flatten(2, -2), place.flatten(), self.shape.rope_theta).view_as(x)


class _BlockLayer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = _BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x_BCNM: Tensor, context_BPM: Tensor, starts_C: Tensor) -> Tensor:
        x_BCNM = x_BCNM + self.self_attn(self.input_layernorm(x_BCNM), context_BPM, starts_C)
        out_BCNM: Tensor = x_BCNM + self.mlp(self.post_attention_layernorm(x_BCNM))
        return out_BCNM


class BlockHead(nn.Module):
    """The head. Embedding and output matrix are the target's, and not its own; what masks read is."""

    def __init__(self, shape: BlockShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(_BlockLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.mask_embedding = nn.Parameter(torch.empty(shape.hidden))
        drawn(self, seed)

    def forward(
        self, features_BPX: Tensor, anchor_BCM: Tensor, masked_BC: Tensor, starts_C: Tensor, masks: int
    ) -> Tensor:
        """Return the normalized output at the masks of the blocks behind the contexts `starts_C`: [B, C, N - 1, M].

        features: of the tokens up to the last start at least.
        anchor: what the target embeds of the token behind each start. masked: where that is the mask's own token.
        """
        context_BPM = self.hidden_norm(self.fc(features_BPX))
        anchor_BCM = torch.where(masked_BC[..., None], self.mask_embedding, anchor_BCM)
        mask_BCNM = self.mask_embedding.expand(*anchor_BCM.shape[:2], masks, -1)
        x_BCNM = torch.cat((anchor_BCM[:, :, None].to(mask_BCNM.dtype), mask_BCNM), 2)
        for layer in self.layers:
            x_BCNM = layer(x_BCNM, context_BPM, starts_C)
        out_BCNM: Tensor = self.norm(x_BCNM[:, :, 1:])
        return out_BCNM
