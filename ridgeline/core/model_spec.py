"""A model as data: a list of layers, each a mixer and a feed-forward.

`models/<arch>.py` turns a Hugging Face `config.json` into a `ModelSpec`; `layers/decoder.py` turns a `ModelSpec`
into a network. Nothing here knows torch, so the planner and the cost model read the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ridgeline.core.cache_layout import CacheGroup, group_layers
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.state_spec import KVSpec, StateSpec


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


Products = dict[str, tuple[int, int, bool]]  # name → (inputs, outputs, has a bias) of matrix products, in order


class MixerSpec(Protocol):
    """What moves information between tokens. Hashable data; equal ones are counted together.

    kind: names the module that computes it (`layers/kinds.py`) and its cost (`perf/parts.py`).
    """

    kind: ClassVar[str]

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation whose table it reads."""

    @property
    def state(self) -> StateSpec:
        """What it remembers between steps."""

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        """Its own norms, each with its width."""

    @property
    def scratch(self) -> int:
        """Numbers per token that lie between its first product and its last."""

    def products(self, width: int) -> Products:
        """Its matrix products, in a model of this width."""


class FeedForwardSpec(Protocol):
    """What computes on each token alone. As `MixerSpec`."""

    kind: ClassVar[str]

    @property
    def scratch(self) -> int: ...

    def products(self, width: int) -> Products: ...


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal (grouped-query) attention. `scale` multiplies q·k before the softmax.

    qk_norm: of queries and keys, each head by itself or, with qk_norm_whole, all heads together. softcap: scores x
    become softcap · tanh(x / softcap). alibi: each head's scores fall linearly with distance (Press et al., arXiv
    2108.12409).
    """

    kind: ClassVar[str] = "attention"
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
    def state(self) -> KVSpec:
        return KVSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        if self.qk_norm is None:
            return ()
        widths = (self.q_size, self.kv_size) if self.qk_norm_whole else (self.head_dim, self.head_dim)
        return tuple((self.qk_norm, width) for width in widths)

    @property
    def scratch(self) -> int:
        return 2 * self.q_size + 2 * self.kv_size

    def products(self, width: int) -> Products:
        return {
            "qkv": (width, self.q_size + 2 * self.kv_size, self.qkv_bias),
            "out": (self.q_size, width, self.out_bias),
        }

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """Feed-forward: gated `down(act(gate(x)) * up(x))`, or plain `down(act(up(x)))`."""

    kind: ClassVar[str] = "mlp"
    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def scratch(self) -> int:
        return 3 * self.intermediate_size

    def products(self, width: int) -> Products:
        first, outputs = ("gate_up", 2 * self.intermediate_size) if self.gated else ("up", self.intermediate_size)
        return {first: (width, outputs, self.bias), "down": (self.intermediate_size, width, self.bias)}


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A mixer and a feed-forward, each added to the residual x.

    norms: "before" each (x += f(norm(x))), "after" (x += norm(f(x))), or "both". parallel: the two see the same x.
    residual_multiplier: of what either adds.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norms: Literal["before", "after", "both"] = "before"
    parallel: bool = False
    residual_multiplier: float = 1.0

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, for those who speak of heads. Raises InvalidConfig where it is of another kind."""
        if not isinstance(self.mixer, AttentionSpec):
            raise InvalidConfig(f"this needs layers of attention, and one has a mixer of the kind {self.mixer.kind!r}.")
        return self.mixer

    @property
    def mlp(self) -> MLPSpec:
        """The feed-forward, for those who speak of its width. Raises InvalidConfig where it is of another kind."""
        if not isinstance(self.feed_forward, MLPSpec):
            raise InvalidConfig(
                f"this needs plain feed-forwards, and a layer has one of the kind {self.feed_forward.kind!r}."
            )
        return self.feed_forward

    def products(self, width: int) -> Products:
        """The matrix products of both parts."""
        return {**self.mixer.products(width), **self.feed_forward.products(width)}


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
        return group_layers([layer.mixer.state for layer in self.layers])


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
