"""A decode step's attention in one op, from the fused projection to the attended heads. Every row brings one token.

It is `rope_kv` and `paged_attention` composed, which are the ops of steps with longer rows. The legend is that of
attention/paged/op.py and small/rotary/op.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax, paged_attention_reference
from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu
from ridgeline.kernels.gemm.fp8.op import in_buffer
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.rotary.op import Projected, rope_kv


def decode_attention(
    projected: Projected,
    batch: RaggedBatch,
    softmax: Softmax,
    buffer: Rounded | None = None,
) -> Tensor:
    """Do everything between the projection and the output product, for a step in which row r has token r and no other
    (tokens_each is 1). Returns [T, H, D]. With `buffer` this is rounded to E4M3 there, with a scale for each token and
    128 elements of its heads in a row.

    Token r is its row's last. It is rotated by its position, which may be another number than that of the keys before
    it. Its place holds the row's newest key afterwards, and is not read before. No row reads what another row of the
    step writes.
    """
    return _plain(projected, batch, softmax, buffer)


def rounding_after(paged_attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention whose result is rounded where there is room, by torch's own ops."""

    def attend(*given: Any, buffer: Rounded | None, **options: Any) -> Tensor:
        out_THD = paged_attention(*given, **options)
        return in_buffer(out_THD.flatten(1), buffer).view_as(out_THD)

    return attend


def composed(rope_kv: Callable[[Projected], Tensor], attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the op made of one implementation of each of its two parts. attend: `paged_attention`, with `buffer`."""

    def decode_attention(
        projected: Projected,
        batch: RaggedBatch,
        softmax: Softmax,
        buffer: Rounded | None = None,
    ) -> Tensor:
        caches = projected.k_cache_NGPD, projected.v_cache_NGPD
        return attend(rope_kv(projected), *caches, batch, softmax, projected.scales, buffer=buffer)

    return decode_attention


_plain = composed(rope_kv, rounding_after(paged_attention_reference))


DECODE_ATTENTION = Op(
    "decode_attention",
    decode_attention,
    (
        Implementation("triton", "ridgeline.kernels.attention.decode.triton:decode_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.attention.decode.torch_ops:decode_attention"),
        Implementation("batch_invariant", "ridgeline.kernels.attention.decode.triton:batch_invariant", on_gpu),
        Implementation("fixed_tiles", "ridgeline.kernels.attention.decode.fixed_tiles:decode_attention", on_cpu),
    ),
    matrix=True,
)
