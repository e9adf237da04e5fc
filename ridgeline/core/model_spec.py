"""A model as data: a list of layers, each a mixer and a feed-forward.

`models/<arch>.py` turns a Hugging Face `config.json` into a `ModelSpec`; `layers/decoder.py` turns a `ModelSpec`
into a network. Nothing here knows torch, so the planner and the cost model read the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.core.cache_spec import CacheGroup, CacheSpec, group_layers


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """kind "rms": x / rms(x) * weight. kind "layer": (x - mean) / std * weight + bias.

    offset: what the checkpoint's weight lacks (Gemma stores weight - 1). With one, the weight is held in float32, since
    the sum has digits that the checkpoint's dtype has not.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0


RopeNumber = float | str | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_dim` of each head, halves rotated (NeoX order).

    scaling: None, or "rope_type" and that type's numbers, as `layers/rotary.py` wants them.
    """

    theta: float
    rotary_dim: int
    scaling: tuple[tuple[str, RopeNumber], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal (grouped-query) attention. `scale` multiplies q·k before the softmax.

    qk_norm: of queries and keys, each head by itself or, with qk_norm_whole, all heads together. softcap: scores x
    become softcap · tanh(x / softcap). alibi: each head's scores fall linearly with distance (Press et al., arXiv
    2108.12409).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_whole: bool = False
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """Feed-forward: gated `down(act(gate(x)) * up(x))`, or plain `down(act(up(x)))`."""

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A mixer and a feed-forward, each added to the residual x.

    norms: "before" each (x += f(norm(x))), "after" (x += norm(f(x))), or "both". parallel: the two see the same x.
    residual_multiplier: of what either adds.
    """

    mixer: AttentionSpec
    feed_forward: MLPSpec
    norm: NormSpec
    norms: Literal["before", "after", "both"] = "before"
    parallel: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that decides the shape of the computation.

    max_position_embeddings: longest context the checkpoint was made for.
    learned_positions: rows of a learned position table added to the embedding (0: none; GPT-2 has one).
    embedding_multiplier: of embedded tokens; embed_norm: of these, before the first layer. logits_multiplier: of the
    scores, which logits_softcap then bounds (x becomes cap · tanh(x / cap)).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    learned_positions: int = 0
    embedding_multiplier: float = 1.0
    embed_norm: NormSpec | None = None
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return group_layers([layer.mixer.cache for layer in self.layers])


@dataclass(frozen=True, kw_only=True)
class Source:
    """One checkpoint tensor. `transpose`: stored [in, out] (GPT-2's Conv1D) where we keep [out, in]. heads: stored
    head by head, so many of them, each with its rows of q, k and v, where we keep all of q, then k, then v.
    interleaved: of so many heads, in each of which rows that rotate as a pair are neighbours, where we keep all
    first halves, then all second ones. complete: a norm's weight that lacks nothing of it (see NormSpec.offset)."""

    name: str
    transpose: bool = False
    heads: int | None = None
    interleaved: int | None = None
    complete: bool = False


# Decoder parameter name → checkpoint tensors concatenated along dimension 0 (q, k, v → qkv; gate, up → gate_up).
WeightMap = dict[str, tuple[Source, ...]]
