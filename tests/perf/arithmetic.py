"""Formulas for what a `ModelSpec` does not describe: mixtures of experts, latent caches, training memory.

docs/arithmetic.md works examples through them; the engine prices its own work in `ridgeline/perf/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.model_spec import ModelSpec
from ridgeline.perf.footprint import parameters


def forward_flops(weights: float, tokens: float) -> float:
    """2 N D: each weight multiplies and adds once per token (Kaplan et al., arXiv 2001.08361, section 2.1)."""
    return 2.0 * weights * tokens


def training_flops(weights: float, tokens: float) -> float:
    """6 N D: the backward pass is two products for the forward's one (same source)."""
    return 3.0 * forward_flops(weights, tokens)


def chinchilla_tokens(weights: float) -> float:
    """About 20 tokens per parameter minimise the loss for given FLOPs (Hoffmann et al., arXiv 2203.15556, table 3)."""
    return 20.0 * weights


def zero3_bytes(weights: float, devices: int) -> float:
    """Bytes per device of weights, gradients and Adam state, all sharded, in mixed precision.

    2 + 2 (bfloat16 weights, gradients) + 4 + 4 + 4 (float32 weights, two moments) = 16 bytes per parameter (ZeRO,
    arXiv 1910.02054, section 3.1). Activations come on top.
    """
    return 16.0 * weights / devices


def score_matrix_bytes(heads: int, queries: int, keys: int, itemsize: float) -> float:
    """The scores of one layer and sequence, were they written out."""
    return itemsize * heads * queries * keys


def tile_bytes(query_rows: int, key_rows: int, head_dim: int, itemsize: float) -> float:
    """FlashAttention's share of the chip: tiles of Q, K and V, float32 scores and accumulator (arXiv 2205.14135)."""
    return itemsize * head_dim * (query_rows + 2 * key_rows) + 4.0 * query_rows * (key_rows + head_dim)


def mha_cache_bytes(layers: int, heads: int, head_dim: int, itemsize: float) -> float:
    """Per token, keys and values of every head."""
    return 2.0 * layers * heads * head_dim * itemsize


def mla_cache_bytes(layers: int, latent: int, rope_dim: int, itemsize: float) -> float:
    """Per token, one latent and one rotary key shared by all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    return float(layers * (latent + rope_dim)) * itemsize


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """`base` with each feed-forward one of `experts`; a router picks `active` per token (arXiv 2401.04088)."""

    base: ModelSpec
    experts: int
    active: int

    @property
    def expert(self) -> int:
        """Parameters of one expert in all layers."""
        width = self.base.hidden_size
        return sum(
            p.inputs * p.outputs for layer in self.base.layers for p in layer.feed_forward.products(width).values()
        )

    @property
    def shared(self) -> int:
        """Parameters every token uses: attention, norms, embeddings, routers."""
        routers = len(self.base.layers) * self.base.hidden_size * self.experts
        return parameters(self.base).total - self.expert + routers

    @property
    def total(self) -> int:
        return self.shared + self.experts * self.expert

    @property
    def active_parameters(self) -> int:
        """Parameters one token uses."""
        return self.shared + self.active * self.expert

    def parameters_per_device(self, devices: int) -> float:
        """Experts divided over `devices`, the rest on each of them."""
        return self.shared + self.experts * self.expert / devices

    def all_to_all_bytes(self, tokens: float, devices: int, itemsize: float) -> float:
        """Bytes `tokens` send in a forward pass if routing is even: to each expert and back, in every layer.

        One in `devices` of the experts is local. No saving for two experts of a token on one device.
        """
        one_way = tokens * self.active * self.base.hidden_size * itemsize * (devices - 1) / devices
        return 2.0 * len(self.base.layers) * one_way
