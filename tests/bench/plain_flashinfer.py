"""FlashInfer's functions in plain torch, by its documentation alone: layouts, page tables, and what is written where.

Names and arguments are those of flashinfer-python 0.5.3. Nothing here knows our ops: rows, blocks and positions come
from `indptr`, `indices` and `last_page_len`, as FlashInfer names them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _attended(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_left: int, cap: float | None, scale: float
) -> Tensor:
    """Attend with the queries of one request, [n, heads, width], to its keys and values, [m, kv heads, width]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1).double(), v.repeat_interleave(group, dim=1).double()
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if causal:
        hidden |= key > at
    if window_left >= 0:
        hidden |= key < at - window_left
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.masked_fill(hidden.all(0)[:, None, None], 0)).to(q.dtype)


def _pages(cache: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, row: int) -> Tensor:
    """Return the rows of one request from a cache [pages, page size, …]."""
    mine = indices[int(indptr[row]) : int(indptr[row + 1])].long()
    return cache[mine].flatten(0, 1)[: (len(mine) - 1) * cache.shape[1] + int(last_page_len[row])]


class _Paged:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        self.layout, self.options = kv_layout, options

    def _run(self, q: Tensor, starts: list[int], caches: tuple[Tensor, Tensor], causal: bool) -> Tensor:
        table, rest = self.planned
        k, v = (x.transpose(1, 2) if self.layout == "HND" else x for x in caches)
        assert k.shape[1:] == (rest["page_size"], rest["num_kv_heads"], rest["head_dim"])
        assert q.shape[1:] == (rest["num_qo_heads"], rest["head_dim"])
        assert (q.dtype, k.dtype) == (rest["q_data_type"], rest["kv_data_type"])
        scale = rest["sm_scale"] or 1 / math.sqrt(q.shape[-1])
        settings = causal, rest["window_left"], rest["logits_soft_cap"], scale
        rows = [(q[a:b], *(_pages(x, *table, n) for x in (k, v))) for n, (a, b) in enumerate(pairwise(starts))]
        return torch.cat([_attended(*row, *settings) for row in rows])


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None,
        disable_split_kv=False,
    ):  # fmt: skip
        self.planned = (indptr, indices, last_page_len), locals()

    def run(self, q, paged_kv_cache):
        return self._run(q, list(range(len(q) + 1)), paged_kv_cache, False)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        given = {**locals(), "head_dim": head_dim_qk}
        self.planned = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), given
        self.starts, self.causal = qo_indptr.tolist(), causal

    def run(self, q, paged_kv_cache):
        return self._run(q, self.starts, paged_kv_cache, self.causal)


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False) -> None:
        pass

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        self.planned = locals()

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        p, found = self.planned, []
        assert ckv_cache.shape[1:] == (p["page_size"], p["head_dim_ckv"])
        assert kpe_cache.shape[1:] == (p["page_size"], p["head_dim_kpe"])
        last = (p["kv_len_arr"] - 1) % p["page_size"] + 1
        for row, (a, b) in enumerate(pairwise(p["qo_indptr"].tolist())):
            c, r = (_pages(x, p["kv_indptr"], p["kv_indices"], last, row)[:, None] for x in (ckv_cache, kpe_cache))
            q, k = torch.cat((q_nope[a:b], q_pe[a:b]), -1), torch.cat((c, r), -1)
            found.append(_attended(q, k, c, p["causal"], -1, None, p["sm_scale"]))
        return torch.cat(found)


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    x = input.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(input.dtype)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input, out=None, enable_pdl=None):
    gate, up = input.double().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(input.dtype)


def gelu_and_mul(input, out=None, enable_pdl=None):
    gate, up = input.double().chunk(2, -1)
    return (F.gelu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    gate, up = input.double().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert is_neox
    assert cos_sin_cache.dtype == torch.float32
    cos, sin = (x[:, None].double() for x in cos_sin_cache[positions].chunk(2, -1))
    half = cos.shape[-1]
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        a, b = heads[..., :half].double(), heads[..., half : 2 * half].double()
        heads[..., :half], heads[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    caches = [x.transpose(1, 2) if kv_layout == "HND" else x for x in paged_kv_cache]
    for new, cache in zip((append_key, append_value), caches, strict=True):
        for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
            page = int(kv_indices[int(kv_indptr[row]) + position // cache.shape[1]])
            cache[page, position % cache.shape[1]] = new[token]


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False,
):  # fmt: skip
    kept = logits.topk(top_k, -1).indices
    probs = torch.zeros_like(logits).scatter(-1, kept, logits.softmax(-1).gather(-1, kept))
    assert top_p == 1.0
    return probs.multinomial(1)[:, 0].int()


mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
sampling = SimpleNamespace(top_k_top_p_sampling_from_logits=top_k_top_p_sampling_from_logits)
