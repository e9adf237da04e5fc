"""Attention to chosen tokens in Triton. The host reads shapes only, so a captured graph serves any lengths. The legend
is that of op.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.kernels.attention.latent.choose import choose
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.attention.paged.triton_common import LOG2E
from ridgeline.kernels.attention.sparse import gathered
from ridgeline.kernels.attention.sparse.cost import SCORE_BYTES
from ridgeline.kernels.attention.sparse.op import IndexCache
from ridgeline.kernels.attention.sparse.triton_kernel import (
    choice_bits_kernel,
    index_choice_kernel,
    index_keys_kernel,
    index_scores_kernel,
    sparse_attention_kernel,
    sparse_combine_kernel,
)
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.kv_cache import LEVELS
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors

HEADS = 16  # of a program that rotates queries
SCORED = 64  # cached tokens that a program scores at once
READ = 1024  # scores that the choice reads at once
WAVES = 4  # programs a multiprocessor that a few tokens are scored by
MOST_PARTS = 16  # of a token's chosen tokens


def index_keys(
    q_TID: Tensor,
    key_TD: Tensor,
    norm_2D: tuple[Tensor, Tensor],
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
    cache: IndexCache,
    place_T: Tensor,
) -> Tensor:
    """Compute `op.index_keys_reference`. The last dimension of every tensor is contiguous, and so are a token's
    queries."""
    (tokens, heads, dim), (cache_NPD, scale_NP) = q_TID.shape, cache
    if key_TD.stride(1) != 1 or q_TID.stride()[1:] != (dim, 1) or cache_NPD.stride(2) != 1:
        raise ValueError("index_keys: tensors must be contiguous in their last dimension, and queries in two")
    out_TID = torch.empty(tokens, heads, dim, dtype=q_TID.dtype, device=q_TID.device)
    if tokens == 0:
        return out_TID
    together = min(HEADS, triton.next_power_of_2(heads))
    index_keys_kernel[(tokens, 1 + triton.cdiv(heads, together))](
        q_TID,
        key_TD,
        *norm_2D,
        cos_sin_ZY,
        positions_T,
        cache_NPD if scale_NP is None else cache_NPD.view(torch.int8),
        scale_NP,
        place_T,
        out_TID,
        eps,
        q_TID.stride(0),
        key_TD.stride(0),
        *cache_NPD.stride()[:2],
        None if scale_NP is None else scale_NP.stride(0),
        HEADS=heads,
        DIM=dim,
        ROPE=cos_sin_ZY.shape[1],
        BLOCK_SIZE=cache_NPD.shape[1],
        D=triton.next_power_of_2(dim),
        E=together,
        INTERLEAVED=interleaved,
        KV=None if scale_NP is None else LEVELS[cache_NPD.dtype],
        num_warps=2,
        **launch_options(q_TID.device),
    )
    return out_TID


def index_topk(q_TID: Tensor, weights_TI: Tensor, cache: IndexCache, batch: RaggedBatch, *, count: int) -> Tensor:
    """Compute `op.index_topk_reference`. Queries and weights are dense. Tokens behind those of the last row get places
    that their row has."""
    (tokens, heads, dim), device = q_TID.shape, q_TID.device
    (keys_NPW, scale_NP), KV = cache, None
    if scale_NP is not None:
        KV, keys_NPW = LEVELS[keys_NPW.dtype], keys_NPW.view(torch.int16)
    chosen_TK = torch.empty(tokens, count, dtype=torch.int32, device=device)
    slot_T, seen_T = _whose(batch, tokens)
    longest = batch.block_table_SC.shape[1] * keys_NPW.shape[1]
    if batch.kv_bound_R is not None:
        longest = min(longest, int(batch.kv_bound_R.max(initial=0)))
    columns = max(16, longest)
    together = max(1, min(tokens, SCORE_BYTES // (4 * columns)))
    scores = torch.empty(together, columns, dtype=torch.float32, device=device)
    tree = (None, None) if batch.tree is None else batch.tree
    for first in range(0, tokens, together):
        programs = min(together, tokens - first)
        if longest > count:
            each = triton.cdiv(WAVES * num_multiprocessors(device), programs)
            index_scores_kernel[(programs, max(1, min(triton.cdiv(longest, SCORED), each)))](
                q_TID,
                weights_TI,
                keys_NPW,
                scale_NP,
                batch.block_table_SC,
                slot_T,
                seen_T,
                *tree,
                scores,
                first,
                count,
                *keys_NPW.stride()[:2],
                None if scale_NP is None else scale_NP.stride(0),
                batch.block_table_SC.stride(0),
                columns,
                HEADS=heads,
                DIM=dim,
                BLOCK_SIZE=keys_NPW.shape[1],
                E=max(16, triton.next_power_of_2(heads)),
                D=max(16 if KV is None else 32, triton.next_power_of_2(dim)),
                TILE=SCORED,
                TREE=batch.tree is not None,
                KV=KV,
                num_warps=4,
                num_stages=3,
                **launch_options(device),
            )
        index_choice_kernel[(programs,)](
            scores,
            seen_T,
            *tree,
            chosen_TK,
            first,
            columns,
            COUNT=count,
            K=triton.next_power_of_2(count),
            TILE=READ,
            TREE=batch.tree is not None,
            num_warps=4,
            **launch_options(device),
        )
    return chosen_TK


def choice_bits(chosen_TK: Tensor, words: int) -> Tensor:
    """Compute `op.choice_bits_reference`."""
    (tokens, count), device = chosen_TK.shape, chosen_TK.device
    bits_TW = torch.zeros(tokens, words, dtype=torch.int64, device=device)
    if tokens:
        padded = triton.next_power_of_2(count)
        choice_bits_kernel[(tokens,)](
            chosen_TK, bits_TW, words, COUNT=count, K=padded, num_warps=4, **launch_options(device)
        )
    return bits_TW


def sparse_attention(
    q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, chosen_TK: Tensor, *, scale: float
) -> Tensor:
    """Compute `op.sparse_attention_reference`. The last dimension of every tensor is contiguous."""
    if any(x.stride(-1) != 1 for x in (q_THL, q_THY, cache_NPW, chosen_TK)):
        raise ValueError("sparse attention: tensors must be contiguous in their last dimension")
    (tokens, heads, rank), rope, device = q_THL.shape, q_THY.shape[2], q_THL.device
    count, slot_T = chosen_TK.shape[1], _whose(batch, tokens)[0] if tokens else None
    if slot_T is not None and gathered.gathers(q_THL, q_THY, cache_NPW, batch, count):
        return gathered.attend(q_THL, q_THY, cache_NPW, batch, slot_T, chosen_TK, scale)
    cut = choose(heads, rank, rank + rope, q_THL.element_size(), device)
    groups = triton.cdiv(heads, cut.queries)
    fixed = batch.schedule is not None and batch.schedule.fixed  # a token's bits must not depend on those beside it
    parts = 1 if fixed else max(1, num_multiprocessors(device) // max(1, tokens * groups))
    parts = min(parts, MOST_PARTS, triton.cdiv(count, 2 * cut.keys))
    out_THL = torch.empty_like(q_THL, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out_THL
    memory = torch.empty(tokens, parts, heads, rank + 1, dtype=torch.float32, device=device) if parts > 1 else out_THL
    sums, lse = memory, memory
    if parts > 1:
        sums, lse = memory.flatten().split((tokens * parts * heads * rank, tokens * parts * heads))
    sparse_attention_kernel[(tokens, groups, parts)](
        q_THL,
        q_THY,
        cache_NPW,
        out_THL,
        batch.block_table_SC,
        slot_T,
        chosen_TK,
        sums,
        lse,
        scale * LOG2E.value,
        *q_THL.stride()[:2],
        *q_THY.stride()[:2],
        cache_NPW.stride(0),
        batch.block_table_SC.stride(0),
        stride_token=cache_NPW.stride(1),
        HEADS=heads,
        COUNT=count,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=cache_NPW.shape[1],
        QUERIES=cut.queries,
        L=triton.next_power_of_2(rank),
        Y=max(16, triton.next_power_of_2(rope)),
        TILE=cut.keys,
        PARTS=parts,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(device),
    )
    if parts > 1:
        sparse_combine_kernel[(tokens, heads)](
            out_THL,
            sums,
            lse,
            HEADS=heads,
            RANK=rank,
            PARTS=parts,
            L=triton.next_power_of_2(rank),
            S=triton.next_power_of_2(parts),
            num_warps=4,
            **launch_options(device),
        )
    return out_THL


def _whose(batch: RaggedBatch, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the tokens' slots, and how many cached tokens each can see: int32 [T]. Layers of a step share them."""
    key = "whose", tokens
    if key not in batch.derived:
        token_T = torch.arange(tokens, device=batch.start_R1.device)
        start_R1, last = batch.start_R1.long(), len(batch.slots_R) - 1
        row_T = torch.searchsorted(start_R1[1:].contiguous(), token_T, right=True).clamp_(max=last)
        length_T = batch.kv_len_R.long()[row_T]
        seen_T = length_T
        if batch.tree is None:
            seen_T = torch.minimum((length_T - start_R1[row_T + 1] + token_T + 1).clamp_(min=0), length_T)
        batch.derived[key] = batch.slots_R[row_T].int(), seen_T.int()
    found: tuple[Tensor, Tensor] = batch.derived[key]
    return found


_KINDS = {
    **{"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "place_ptr": "*i64", "weights_ptr": "*fp32"},
    **{"table_ptr": "*i32", "slot_ptr": "*i32", "seen_ptr": "*i32", "scores_ptr": "*fp32", "chosen_ptr": "*i32"},
    **{"parts_ptr": "*fp32", "part_lse_ptr": "*fp32", "words_ptr": "*i64"},
}
_WHOLE = ("first_token", "count", "stride_table", "stride_scores", "stride_words")
_TREES = ("bits_ptr", "base_ptr")


def _aot(kernel: Any, constants: dict[str, Any], arch: str, *, tree: bool = False, **how: Any) -> AotKernel:
    """Return an entry of DeepSeek-V3.2's shapes."""
    if "scale_ptr" in kernel.arg_names and constants.get("KV") is None:
        constants = {**constants, "KV": None, "scale_ptr": None, "stride_scale": None}
    names = [name for name in kernel.arg_names if name not in (*constants, "PDL")]
    signature = {name: "i32:16" if name.startswith("stride_") else _KINDS.get(name, "*bf16") for name in names}
    signature |= {name: "*i64" for name in _TREES if name in names}
    signature |= {name: kind for name, kind in (("eps", "fp32"), ("scale", "fp32")) if name in names}
    signature |= {name: "i32" for name in _WHOLE if name in names}
    absent = () if tree else tuple(name for name in _TREES if name in names)
    for name in absent:
        del signature[name]
    if constants.get("KV") is not None:
        signature |= {"cache_ptr": "*i16" if "TILE" in constants else "*i8", "stride_scale": "i32"}
    return AotKernel(kernel, signature, constants | dict.fromkeys(absent), archs=(arch,), **{"hot": True, **how})


def _attends(heads: int, cut: tuple[int, int, int, int], parts: int, arch: str) -> AotKernel:
    queries, keys, warps, stages = cut
    constants = {
        "stride_token": 576, "HEADS": heads, "COUNT": 2048, "RANK": 512, "ROPE": 64, "BLOCK_SIZE": 64,
        "QUERIES": queries, "L": 512, "Y": 64, "TILE": keys, "PARTS": parts,
    }  # fmt: skip
    how: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "tensor_cores": "MMA"}
    return _aot(sparse_attention_kernel, constants, arch, hot=queries < 64, **how)


def _others(arch: str) -> tuple[AotKernel, ...]:
    index = {"HEADS": 64, "DIM": 128, "BLOCK_SIZE": 64, "D": 128}
    choice = {"COUNT": 2048, "K": 2048, "TILE": READ, "TREE": False}
    combined = {"HEADS": 128, "RANK": 512, "PARTS": MOST_PARTS, "L": 512, "S": MOST_PARTS}
    rotates = {"ROPE": 64, "E": HEADS, "INTERLEAVED": False}
    scored: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "tensor_cores": "MMA"}
    return (
        _aot(index_keys_kernel, {**index, **rotates}, arch, num_warps=2),
        _aot(index_scores_kernel, {**index, "E": 64, "TILE": SCORED, "TREE": False}, arch, **scored),
        *(
            _aot(index_scores_kernel, {**index, "E": 64, "TILE": SCORED, "TREE": False, "KV": keys}, arch, **scored)
            for keys in ("int8", "e4m3")
        ),
        _aot(index_keys_kernel, {**index, **rotates, "KV": "int8"}, arch, num_warps=2),
        _aot(choice_bits_kernel, {"COUNT": 2048, "K": 2048}, arch, num_warps=4),
        _aot(index_choice_kernel, choice, arch, num_warps=4),
        _aot(sparse_combine_kernel, combined, arch, num_warps=4),
    )


AOT = (
    *(entry for arch in ONE_OF_EACH for entry in _others(arch)),
    _attends(128, (64, 64, 8, 2), 1, "sm_90"),
    _attends(16, (16, 64, 8, 3), MOST_PARTS, "sm_90"),
    _attends(128, (32, 16, 4, 1), 1, "gfx942"),
)
