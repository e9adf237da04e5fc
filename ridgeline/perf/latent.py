"""The ops between latent attention's first product and its last, with their costs.

Legend:
    R  rows
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.specs.latent import IndexerSpec, LatentAttentionSpec
from ridgeline.kernels.attention.expanded.cost import (
    expanded_attention_cost,
    expanded_bytes,
    expansion_cost,
    worth_expanding,
)
from ridgeline.kernels.attention.latent.cost import latent_attention_cost, latent_kv_cost, parts_bytes
from ridgeline.kernels.attention.sparse.cost import (
    WORD_BYTES,
    choice_bits_cost,
    index_keys_cost,
    index_topk_cost,
    masked_words,
    sparse_attention_cost,
    sparse_bytes,
    worth_masking,
)
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import ITEM_BYTES, Precision, dtype_name, kv_itemsize


def latent_attention(
    mixer: LatentAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between latent attention's products. The products with the heads' projections of keys and values
    count as the one of latents, which has as many FLOPs. Rows that are worth expanding attend to keys and values, and
    those of tokens that were cached before are made again, which counts with their attention."""
    sizes = {"num_heads": mixer.num_heads, "rank": mixer.rank, "rope_dim": mixer.rope_dim}
    if mixer.query_rank:
        yield "query_norm", norm_cost(tokens, mixer.query_rank, itemsize=p.item, kind="rms")
    levels = has_levels(mixer, kv_dtype)
    yield "latent_kv", latent_kv_cost(tokens, **sizes, itemsize=p.item, levels=levels)
    new_R, length_R = np.asarray(shape.num_tokens_R), np.asarray(shape.kv_len_R)
    if mixer.indexer is not None:
        heads, count = {"heads": mixer.indexer.heads, "dim": mixer.indexer.dim}, mixer.indexer.selected
        sparse_R = length_R > count
        rows = new_R[sparse_R], length_R[sparse_R]
        kept = index_itemsize(mixer.indexer, p.item, kv_dtype)
        if mixer.chooser is None:
            yield "index_keys", index_keys_cost(tokens, **heads, itemsize=p.item, key_itemsize=kept)
            if sparse_R.any():
                yield "index_topk", index_topk_cost(*rows, **heads, count=count, itemsize=p.item, key_itemsize=kept)
        masked_R = sparse_R & worth_masking(new_R, length_R, count=count, **mixer.widths)
        gathered_R = sparse_R & ~masked_R
        if gathered_R.any():
            rows = new_R[gathered_R], length_R[gathered_R]
            yield "sparse_attention", sparse_attention_cost(*rows, **sizes, count=count, itemsize=p.item)
        if masked_R.any():
            words = -(-int(length_R[masked_R].max()) // 64)
            yield "choice_bits", choice_bits_cost(int(new_R[sparse_R].sum()), words=words, count=count)
            yield "expanded_attention", _expanded(mixer, new_R[masked_R], length_R[masked_R], p)
        new_R, length_R = new_R[~sparse_R], length_R[~sparse_R]
        if not len(new_R):
            return
    parts = {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim}
    long_R = worth_expanding(new_R, length_R, **parts, rank=mixer.rank)
    if long_R.any():
        yield "expanded_attention", _expanded(mixer, new_R[long_R], length_R[long_R], p)
    if not long_R.all():
        short = new_R[~long_R], length_R[~long_R]
        yield "latent_attention", latent_attention_cost(*short, **sizes, itemsize=p.item, levels=levels)


def _expanded(mixer: LatentAttentionSpec, new_R: np.ndarray, length_R: np.ndarray, p: Precision) -> Cost:
    """Return the cost of attention to keys and values, those that are made again included."""
    made = {"num_heads": mixer.num_heads, "key_dim": mixer.key_dim, "value_dim": mixer.value_dim}
    attended = expanded_attention_cost(new_R, length_R, **made, rope_dim=mixer.rope_dim, itemsize=p.item)
    before = float((length_R - new_R).sum())
    return attended + expansion_cost(before, **made, rank=mixer.rank, itemsize=p.item)


def has_levels(mixer: LatentAttentionSpec, kv_dtype: str | None) -> bool:
    """Return True if latents are cached with 8 bits. kv_dtype: the cache's type if it is not the layer's own."""
    name = kv_dtype or mixer.format.dtype
    return mixer.indexer is None and name is not None and ITEM_BYTES[dtype_name(name)] == 1


def index_itemsize(index: IndexerSpec, itemsize: float, kv_dtype: str | None) -> float:
    """Return the bytes of a number of a cached index key. kv_dtype: the cache's type if it is not the layer's own."""
    name = kv_dtype or index.format.dtype
    return kv_itemsize(name, index.dim) if name else itemsize


def workspace(mixer: LatentAttentionSpec, tokens: int, sizes: StepSizes) -> int:
    """Return the bytes of a layer that are neither its inputs nor its outputs: what short rows add up, some of which
    verify drafts, or the keys and values of rows that bring many of the step's tokens."""
    each = -(-sizes.max_scored // max(1, sizes.max_seqs))
    short = parts_bytes(sizes.max_seqs, each, num_heads=mixer.num_heads, rank=mixer.rank)
    heads = {name: getattr(mixer, name) for name in ("num_heads", "key_dim", "rope_dim", "value_dim", "rank")}
    longest = max(sizes.longest, tokens)
    index = mixer.indexer
    chosen = 0
    if index is not None:
        words = masked_words(longest, count=index.selected, **mixer.widths)
        chosen = (
            sparse_bytes(tokens, longest, index.selected, mixer.width * sizes.itemsize)
            + 2 * tokens * words * WORD_BYTES
        )
    return max(short, expanded_bytes(tokens, longest, **heads, itemsize=sizes.itemsize)) + chosen
