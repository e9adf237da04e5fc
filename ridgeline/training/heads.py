"""Heads that draft, as plain torch modules over whole sequences. Their parameters have the names of published
checkpoints.

A head of EAGLE-3 (Li et al., arXiv 2503.01840) joins the outputs of some of the target's layers to a feature of each
token. Position i holds a pair, the feature of token i and token i + 1, and scores token i + 2. Then the output takes
the place of the next feature, which is not known yet, and so on. Such a chain of passes sees the pairs of real features
up to the one that it began with, and its own.

    keys of real pairs      keys of the chain that began with pair 2
    0  1  2  3  4 …         3' 4'
    x  x  x                         pass 0, query 2
    x  x  x                 x       pass 1, query 3'
    x  x  x                 x  x    pass 2, query 4'

Medusa's heads (Cai et al., arXiv 2401.10774) read what the target's final norm returned. Head i guesses the token
i + 2 places behind.

Legend:
    B  sequences
    S  tokens per sequence
    P  pairs
    C  chains, by the pairs with which they begin
    J  passes whose keys a chain has so far
    H  query heads
    G  key/value heads
    D  head width
    M  model width
    X  features of a token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.training.optimizer import INIT_STD


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """The sizes of a head. taps: the target's layers behind which it reads, counted from 0."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    eps: float
    rope_theta: float
    vocab: int
    positions: int

    def config(self) -> dict[str, Any]:
        """Return config.json as such heads are published."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.positions,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            "draft_vocab_size": self.vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)},
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """The root-mean-square norm, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x of any shape [.., M], normalized."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)


class FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the addend of x, of any shape [.., M]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.mlp = FeedForward(shape)


class EagleHead(nn.Module):
    """The head. Embedding and output matrix are the target's, and not its own."""

    def __init__(self, shape: EagleShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        drawn(self, seed)
        with torch.no_grad():
            # The feature begins as the deepest tapped output, in whose terms the output matrix reads
            self.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)

    def forward(
        self, features_BSX: Tensor, embed: Callable[[int], Tensor], starts_C: Tensor, pairs: int, passes: int
    ) -> Iterator[Tensor]:
        """Yield the output of each pass of the chains that begin with the pairs `starts_C`, in front of the norm and
        the output matrix: [B, C, M].

        embed: returns what the target embeds of the tokens `offset` places behind every pair's feature: [B, P, M].
        pairs: those with which chains may begin, the first ones of each sequence.
        """
        feature_BPM = self.fc(features_BSX[:, :pairs]).float()
        place_P = torch.arange(pairs, device=feature_BPM.device)
        read_BPX = self._read(embed(1), feature_BPM)
        real = self._keys_and_values(read_BPX, place_P)
        unseen_CP = place_P > starts_C[:, None]
        own: list[tuple[Tensor, Tensor]] = []
        x_BCM, read_BCX = feature_BPM[:, starts_C], read_BPX[:, starts_C]
        for index in range(passes):
            if index:
                read_BCX = self._read(embed(1 + index)[:, starts_C], x_BCM)
                own.append(self._keys_and_values(read_BCX, starts_C + index))
            x_BCM = self._pass(x_BCM, read_BCX, starts_C + index, real, unseen_CP, own)
            yield x_BCM

    def _read(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Return the attention's input, made of pairs: [.., 2 M]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)

    def _keys_and_values(self, read: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values of pairs at some places, once for each query head: [B, H, P, D]."""
        attention, shape = self.midlayer.self_attn, self.shape
        k, v = (project(read).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for project in (
            attention.k_proj, attention.v_proj
        ))  # fmt: skip
        group = shape.heads // shape.kv_heads
        return rotated(k, place, shape.rope_theta).repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _pass(
        self,
        x_BCM: Tensor,
        read_BCX: Tensor,
        place_C: Tensor,
        real: tuple[Tensor, Tensor],
        unseen_CP: Tensor,
        own: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        attention, shape = self.midlayer.self_attn, self.shape
        q_BHCD = attention.q_proj(read_BCX).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q_BHCD = rotated(q_BHCD, place_C, shape.rope_theta)
        mixed_BHCD = _mixed(q_BHCD, real, unseen_CP, own)
        x_BCM = x_BCM + attention.o_proj(mixed_BHCD.transpose(1, 2).flatten(2))
        return x_BCM + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x_BCM))


def _mixed(
    q_BHCD: Tensor, real: tuple[Tensor, Tensor], unseen_CP: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return attention to the real pairs that each chain sees and to its own: [B, H, C, D]."""
    k_BHPD, v_BHPD = real
    if not own:
        return F.scaled_dot_product_attention(q_BHCD, k_BHPD, v_BHPD, attn_mask=~unseen_CP)
    q_BHCD = q_BHCD * q_BHCD.shape[-1] ** -0.5
    scores = [(q_BHCD @ k_BHPD.transpose(-1, -2)).float().masked_fill(unseen_CP, -torch.inf)]
    scores += [(q_BHCD * k_BHCD).sum(-1, keepdim=True).float() for k_BHCD, _ in own]
    weights_BHCP, weights_BHCJ = torch.cat(scores, -1).softmax(-1).split((unseen_CP.shape[1], len(own)), -1)
    mixed_BHCD = weights_BHCP.to(v_BHPD.dtype) @ v_BHPD
    for index, (_, v_BHCD) in enumerate(own):
        mixed_BHCD = mixed_BHCD + weights_BHCJ[..., index : index + 1] * v_BHCD
    return mixed_BHCD


@torch.no_grad()
def drawn(head: nn.Module, seed: int) -> None:
    """Fill all parameters of a head but its norms with normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.copy_(INIT_STD * torch.randn(parameter.shape, generator=generator))


def rotated(x_BHPD: Tensor, place_P: Tensor, theta: float) -> Tensor:
    """Rotate heads by their places, the first half of a head's numbers with the second."""
    half = x_BHPD.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x_BHPD.device) / half)
    angle = place_P[:, None] * frequency
    cos, sin = angle.cos().to(x_BHPD.dtype), angle.sin().to(x_BHPD.dtype)
    a, b = x_BHPD[..., :half], x_BHPD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)  # so that each head begins as the target's own output
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """The heads, one residual block each. The output matrix is the target's."""

    def __init__(self, count: int, hidden: int, vocab: int) -> None:
        super().__init__(nn.ModuleList([_Residual(hidden)]) for _ in range(count))
        self.hidden, self.vocab = hidden, vocab

    def config(self) -> dict[str, Any]:
        """Return config.json as such heads are published."""
        return {
            "model_type": "medusa",
            "medusa_num_heads": len(self),
            "medusa_num_layers": 1,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "torch_dtype": "bfloat16",
        }
