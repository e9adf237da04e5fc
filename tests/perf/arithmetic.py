"""Formulas for what a `ModelSpec` does not describe: latent caches, training memory.

docs/arithmetic.md works examples through them; the engine prices its own work in `ridgeline/perf/`.
"""

from __future__ import annotations


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
