"""The cost in quality of the KV cache's formats, keys and values each by themselves.

The formats are simulated: a number is stored as the number that its level stands for, in a cache of plain numbers. So
keys and values can be of unlike formats, and formats can be tried that no kernel has (int4). The real formats are
`LLMConfig.kv_cache_dtype`; they give the same numbers (tests/bench/quality/test_kv_formats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.bench.quality.perplexity import Reading, TextScore, perplexity
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels import kv_cache
from ridgeline.kernels.decode_attention.op import composed
from ridgeline.kernels.rotary.op import rope_kv
from ridgeline.llm import LLM

GROUP = 32  # neighbouring elements of a head that share a scale and a zero point in int4
PLAIN = "auto"
FORMATS = (PLAIN, "fp8_e4m3", "fp8_e5m2", "int8", "int4")


@dataclass(frozen=True)
class KVScore:
    """A text's score with keys of one format and values of another."""

    keys: str
    values: str
    score: TextScore


def stored(x: Tensor, name: str) -> Tensor:
    """Return what a cache of this format keeps of rows, the last dimension. int4 has 16 even steps from the smallest to
    the largest of each GROUP (as KIVI, arXiv 2402.02750, has for values)."""
    if name == PLAIN:
        return x
    if name == "int4":
        groups = x.float().unflatten(-1, (-1, min(GROUP, x.shape[-1])))
        least, most = groups.aminmax(dim=-1, keepdim=True)
        step = ((most - least) / 15).clamp(min=1e-30)
        return (((groups - least) / step).round() * step + least).flatten(-2).to(x.dtype)
    if name not in FORMATS:
        raise InvalidConfig(f"unknown format of keys or values {name!r}; known: {', '.join(FORMATS)}.")
    dtype = kv_cache.TORCH_TYPES[name]
    scale = kv_cache.row_scales(x, dtype)
    return kv_cache.numbers(kv_cache.levels(x, scale, dtype), scale, x.dtype)


@contextmanager
def cached_as(llm: LLM, keys: str, values: str) -> Iterator[None]:
    """Inside, the engine's keys and values are stored in these formats. The engine must run op by op, its cache hold
    plain numbers, and nothing be taken over from earlier requests."""
    config = llm.config
    if config.kv_cache_dtype != PLAIN or config.enable_prefix_caching or not config.enforce_eager:
        raise InvalidConfig(
            "formats are simulated with kv_cache_dtype auto, enforce_eager, and without enable_prefix_caching."
        )
    ops = llm.assembly.ops
    before = ops.rope_kv, ops.decode_attention
    write = storing(rope_kv, keys, values)
    ops.rope_kv, ops.decode_attention = write, composed(write, ops.paged_attention)
    try:
        yield
    finally:
        ops.rope_kv, ops.decode_attention = before


def storing(write: Callable[..., Tensor], keys: str, values: str) -> Callable[..., Tensor]:
    """Return `rope_kv` with the stored keys and values replaced by what their formats keep of them."""

    def rope_kv(*arguments: object, **options: object) -> Tensor:
        queries = write(*arguments, **options)
        place_T = arguments[8]
        assert isinstance(place_T, Tensor)
        for cache_NGPD, name in ((arguments[6], keys), (arguments[7], values)):
            assert isinstance(cache_NGPD, Tensor)
            block_T, offset_T = place_T // cache_NGPD.shape[2], place_T % cache_NGPD.shape[2]
            cache_NGPD[block_T, :, offset_T] = stored(cache_NGPD[block_T, :, offset_T], name)
        return queries

    return rope_kv


@torch.inference_mode()
def study(llm: LLM, reading: Reading, formats: Sequence[str] = FORMATS) -> list[KVScore]:
    """Return the text's score with plain keys and values, then with each format for keys alone, for values alone and
    for both."""
    pairs = [(PLAIN, PLAIN)]
    for name in formats:
        if name != PLAIN:
            pairs += [(name, PLAIN), (PLAIN, name), (name, name)]
    scores = []
    for keys, values in pairs:
        with cached_as(llm, keys, values):
            scores.append(KVScore(keys, values, perplexity(llm, reading)))
    return scores
