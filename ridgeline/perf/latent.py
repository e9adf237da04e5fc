"""The ops between latent attention's first product and its last, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.cost import StepShape
from ridgeline.core.latent_spec import LatentAttentionSpec
from ridgeline.kernels.latent_attention.cost import latent_attention_cost, latent_kv_cost
from ridgeline.kernels.norm.cost import norm_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import Precision


def latent_attention(
    mixer: LatentAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between latent attention's products. The products with the heads' projections of keys and values
    count as the one of latents, which has as many FLOPs."""
    sizes = {"num_heads": mixer.num_heads, "rank": mixer.rank, "rope_dim": mixer.rope_dim}
    if mixer.query_rank:
        yield "query_norm", norm_cost(tokens, mixer.query_rank, itemsize=p.item, kind="rms")
    yield "latent_kv", latent_kv_cost(tokens, **sizes, itemsize=p.item)
    yield (
        "latent_attention",
        latent_attention_cost(shape.num_tokens_R, shape.kv_len_R, **sizes, itemsize=p.item),
    )
