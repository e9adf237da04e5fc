"""Attention to chosen latents by Hopper's kernel for all latents: what each token chose is gathered first, as a cache
of its own. That writes and reads the chosen vectors once more, and the products then run at the rate of that kernel,
which is several times that of one that gathers by itself. The legend is that of op.py, and

    t  tokens whose vectors are gathered at once
    S  vectors that a program copies
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.latent.triton import latent_attention
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.attention.sparse import cost
from ridgeline.kernels.attention.sparse.cost import GATHERED_BYTES
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability, launch_options, num_multiprocessors

BLOCK, COPIED = 64, 32  # tokens of a block of gathered vectors, and of a program that gathers
QUERIES = 64  # heads of a program of the kernel behind it


def gathers(q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, count: int) -> bool:
    """Return True where Hopper's kernel would take the gathered vectors, if bits may depend on what runs beside a
    token."""
    if (
        not cost.GATHERS
        or compute_capability(q_THL.device) != (9, 0)
        or (batch.schedule is not None and batch.schedule.fixed)
    ):
        return False
    from ridgeline.kernels.attention.latent import hopper  # Gluon, which other devices do without

    like = cache_NPW.new_empty(1, BLOCK, cache_NPW.shape[2], device="meta")
    return count % BLOCK == 0 and hopper.supports(q_THL.shape[1], q_THL, q_THY, like, items=True)


def attend(
    q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, slot_T: Tensor, chosen_TK: Tensor, scale: float
) -> Tensor:
    """Compute `op.sparse_attention_reference`. slot_T: the tokens' slots."""
    tokens, count, width = len(q_THL), chosen_TK.shape[1], cache_NPW.shape[2]
    each = tokens_at_once(tokens, q_THL.shape[1], count * width * cache_NPW.element_size(), q_THL.device)
    blocks = count // BLOCK
    gathered = cache_NPW.new_empty(each * blocks, BLOCK, width)
    kv_len_t = torch.empty(each, dtype=torch.int32, device=q_THL.device)
    found: list[Tensor] = []
    for first in range(0, tokens, each):
        some = slice(first, min(tokens, first + each))
        rows = some.stop - first
        _gather_kernel[(rows, count // COPIED)](
            cache_NPW, batch.block_table_SC, slot_T, chosen_TK, gathered, kv_len_t, first, cache_NPW.stride(0),
            batch.block_table_SC.stride(0), stride_token=cache_NPW.stride(1), COUNT=count,
            K=triton.next_power_of_2(count), WIDTH=width, MOST=1 << (width.bit_length() - 1),
            BLOCK_SIZE=cache_NPW.shape[1], S=COPIED, num_warps=8, **launch_options(q_THL.device),
        )  # fmt: skip
        own = _rows(batch, rows, blocks, q_THL.device, kv_len_t)
        found.append(latent_attention(q_THL[some], q_THY[some], gathered, own, scale=scale))
    return found[0] if len(found) == 1 else torch.cat(found)


def tokens_at_once(tokens: int, heads: int, token_bytes: int, device: torch.device) -> int:
    """Return the number of tokens whose vectors are gathered at once: what fits the memory, in whole waves."""
    each = max(1, min(tokens, GATHERED_BYTES // token_bytes))
    wave = max(1, num_multiprocessors(device) // triton.cdiv(heads, QUERIES))
    return each if each == tokens or each < wave else each // wave * wave


def _rows(batch: RaggedBatch, rows: int, blocks: int, device: torch.device, kv_len_t: Tensor) -> RaggedBatch:
    """Return rows of one token each, whose keys are the gathered ones."""
    key = "gathered", rows, blocks
    if key not in batch.derived:
        place = torch.arange(rows * blocks + 1, dtype=torch.int32, device=device)
        batch.derived[key] = place[: rows + 1], place[: rows * blocks].view(rows, blocks)
    place, table_SC = batch.derived[key]
    return RaggedBatch(
        slots_R=place[:rows], block_table_SC=table_SC, start_R1=place, kv_len_R=kv_len_t[:rows], tokens_each=1
    )


@triton.jit(do_not_specialize=["first"])
def _gather_kernel(
    cache_ptr, table_ptr, slot_ptr, chosen_ptr, out_ptr, kv_len_ptr, first, stride_block, stride_table,
    stride_token: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy S of a token's chosen vectors, and store how many it chose. Of a token that chose none one vector of zeros
    is copied, which gives zeros. K: COUNT, padded. MOST: the largest power of two that is not beyond WIDTH."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = (first + row).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chosen_ptr += token * COUNT
    if part == 0:
        k_K = tl.arange(0, K)
        own_K = tl.load(chosen_ptr + k_K, mask=k_K < COUNT, other=-1)
        tl.store(kv_len_ptr + row, tl.maximum(tl.sum((own_K >= 0).to(tl.int32), 0), 1))
    s_S = tl.arange(0, S)
    place_S = tl.load(chosen_ptr + part * S + s_S)
    if (tl.max(place_S, 0) < 0) & (part > 0):  # places come first, and -1 behind them
        return
    real_S = place_S >= 0
    table_ptr += tl.load(slot_ptr + token).to(tl.int64) * stride_table
    block_S = tl.load(table_ptr + place_S // BLOCK_SIZE, mask=real_S, other=0).to(tl.int64)
    from_ptr_S1 = cache_ptr + (block_S * stride_block + place_S % BLOCK_SIZE * stride_token)[:, None]
    to_ptr_S1 = out_ptr + ((row * COUNT + part * S).to(tl.int64) + s_S)[:, None] * WIDTH
    w_W = tl.arange(0, MOST)[None, :]
    tl.store(to_ptr_S1 + w_W, tl.load(from_ptr_S1 + w_W, mask=real_S[:, None], other=0))
    if WIDTH > MOST:
        inside = MOST + w_W < WIDTH
        if 8 * (WIDTH - MOST) <= MOST:  # a few numbers more, as rotated parts are
            w_W = tl.arange(0, MOST // 8)[None, :]
            inside = MOST + w_W < WIDTH
        kept_SW = tl.load(from_ptr_S1 + MOST + w_W, mask=real_S[:, None] & inside, other=0)
        tl.store(to_ptr_S1 + MOST + w_W, kept_SW, mask=inside.broadcast_to(kept_SW.shape))


AOT = (
    AotKernel(
        _gather_kernel,
        {
            **dict.fromkeys(("cache_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("table_ptr", "slot_ptr", "chosen_ptr", "kv_len_ptr"), "*i32"),
            **{"first": "i32", "stride_block": "i32:16", "stride_table": "i32"},
        },
        {
            "stride_token": 576, "COUNT": 2048, "K": 2048, "WIDTH": 576, "MOST": 512, "BLOCK_SIZE": 64, "S": COPIED,
        },
        num_warps=8,
        archs=("sm_90",),
        hot=True,
    ),
)  # fmt: skip
