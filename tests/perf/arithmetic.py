"""Formulas for what a `ModelSpec` does not describe: written-out scores, tiles, latent caches.

docs/arithmetic.md works examples through them; the engine prices its own work in `ridgeline/perf/`.
"""

from __future__ import annotations


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
