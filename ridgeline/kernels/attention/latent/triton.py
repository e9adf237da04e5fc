"""Latent attention in Triton: short rows by stretches of their keys, long rows by tiles of their queries.

The host reads shapes only, so a captured graph serves any lengths. The legend is that of op.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.kernels.attention.latent.choose import MOST_QUERIES, choose
from ridgeline.kernels.attention.latent.kernel_cache import for_kernels
from ridgeline.kernels.attention.latent.op import LatentCache, tokens_held
from ridgeline.kernels.attention.latent.triton_kernel import combine_kernel, latent_kernel
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, Schedule
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.attention.paged.triton_common import LOG2E, Cut
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import compute_capability, launch_options

COMBINED = 2048  # numbers of parts that a program of the second launch reads at once
COMBINERS = 4096  # its programs; more, of which many have nothing to do, take longer to start than they save
FEW_PARTS, MOST_PARTS = 8, 64  # of a row that it reads at once
FEWEST_COMBINERS = 64  # for fewer programs, each reads more parts of fewer columns


def latent_attention(
    q_THL: Tensor, q_THY: Tensor, cache: LatentCache, batch: RaggedBatch, *, scale: float, cut: Cut | None = None,
    lse_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `op.latent_attention_reference`. cut: how it is cut, if that is not to be chosen. lse_TH: float32, where
    the natural logarithms of sums are written, of rows that see any key.

    Block sizes are powers of two, and the last dimension of every tensor is contiguous. Cells that no query sees may
    hold NaN.
    """
    if any(x.stride(-1) != 1 for x in (q_THL, q_THY)):
        raise ValueError("latent attention: queries must be contiguous in their last dimension")
    schedule = schedule_of(q_THL, q_THY, batch) if batch.schedule is None else batch.schedule
    if schedule.window is not None or schedule.cascade is not None:
        raise ValueError("latent attention: make schedules without a window or shared blocks")
    if batch.tree is not None and not schedule.trees:
        raise ValueError("latent attention: make schedules with trees for batches that have them")
    out_THL = torch.empty_like(q_THL, memory_format=torch.contiguous_format)
    tensors, counts_R = (q_THL, q_THY, cache, out_THL, lse_TH), batch.num_tokens_R
    # If the host knows the rows, it skips launches that would have nothing to do
    if not schedule.fixed and (counts_R is None or ((counts_R > 0) & (counts_R <= schedule.few)).any()):
        _items(schedule, tensors, batch, scale, cut)
    if len(schedule.tiles_J4) and (counts_R is None or schedule.fixed or (counts_R > schedule.few).any()):
        anything = schedule.counts_2  # there are no parts
        work = schedule.tiles_J4, schedule.counts_2, anything, anything, anything
        _launch(schedule.tile_tokens, work, tensors, batch, scale, cut)
    return out_THL


def partial_latent_attention(
    q_THL: Tensor, q_THY: Tensor, cache: LatentCache, batch: RaggedBatch, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `op.partial_latent_attention`."""
    lse_TH = torch.full(q_THL.shape[:2], -torch.inf, dtype=torch.float32, device=q_THL.device)
    return latent_attention(q_THL, q_THY, cache, batch, scale=scale, lse_TH=lse_TH), lse_TH


# Queries, their rotated parts, what they attend to, the results, and the logarithms of sums
Tensors = tuple[Tensor, Tensor, LatentCache, Tensor, Tensor | None]


def schedule_of(q_THL: Tensor, q_THY: Tensor, batch: RaggedBatch) -> Schedule:
    """Return the schedule of a step, which its layers share."""
    tokens, heads, _ = q_THL.shape
    of_layers = AttentionShape(
        num_tokens=tokens,
        tokens_each=batch.tokens_each,
        num_heads=heads,
        num_kv_heads=1,
        head_bytes=(q_THL.shape[2] + q_THY.shape[2]) * q_THL.element_size(),
        item_queries=MOST_QUERIES,
        trees=batch.tree is not None,
    )
    return make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)


def _items(schedule: Schedule, tensors: Tensors, batch: RaggedBatch, scale: float, cut: Cut | None) -> None:
    """Attend with the rows that are cut into items, and add up the parts of those that have several."""
    q_THL, _, _, out_THL, lse_TH = tensors
    (num_tokens, heads, rank), device = q_THL.shape, q_THL.device
    max_items, num_rows = len(schedule.items_I8), len(batch.slots_R)
    parts = torch.empty(max_items, schedule.few * heads, rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(max_items, schedule.few * heads, dtype=torch.float32, device=device)
    whose_T2 = torch.empty(num_tokens, 2, dtype=torch.int32, device=device)
    work = schedule.items_I8, schedule.counts_2, parts, part_lse, whose_T2
    _launch(schedule.few, work, tensors, batch, scale, cut)
    together = max(FEW_PARTS, FEWEST_COMBINERS * COMBINED // (num_rows * schedule.few * heads * rank))
    together = triton.next_power_of_2(min(MOST_PARTS, together, max(2, max_items // num_rows)))
    columns = COMBINED // together
    slices = min(triton.cdiv(schedule.few * heads * rank, columns), max(1, COMBINERS // num_rows))
    combine_kernel[(num_rows * slices,)](
        out_THL,
        lse_TH,
        batch.start_R1,
        whose_T2,
        parts,
        part_lse,
        slices,
        HEADS=heads,
        TOKENS=schedule.few,
        RANK=rank,
        PARTS=together,
        COLUMNS=columns,
        num_warps=4,
        **launch_options(device),
    )


def _launch(
    tokens: int, work: tuple[Tensor, ...], tensors: Tensors, batch: RaggedBatch, scale: float,
    cut: Cut | None,
) -> None:  # fmt: skip
    """Attend with items or tiles of up to so many tokens. work: (their table, counts, and what the parts of items go
    to)."""
    q_THL, q_THY, cache, out_THL, lse_TH = tensors
    (_, heads, rank), rope = q_THL.shape, q_THY.shape[2]
    plain = cut is None and batch.tree is None and lse_TH is None
    if isinstance(cache, Tensor) and plain and compute_capability(q_THL.device) == (9, 0):
        from ridgeline.kernels.attention.latent import hopper as of_hopper  # Gluon, which other devices do without

        if of_hopper.supports(tokens * heads, q_THL, q_THY, cache, items=work[0].shape[1] == 8):
            of_hopper.attend(tokens, work, (q_THL, q_THY, cache, out_THL), batch, scale)
            return
    own = for_kernels(cache, torch.int16)
    cut = cut or choose(tokens * heads, rank, rank + rope, q_THL.element_size(), q_THL.device)
    latent_kernel[(len(work[0]) * triton.cdiv(tokens * heads, cut.queries),)](
        q_THL,
        q_THY,
        own.latents,
        own.rotated,
        own.scale,
        out_THL,
        batch.block_table_SC,
        *work,
        lse_TH,
        *((None, None) if batch.tree is None else batch.tree),
        scale * LOG2E.value,
        *q_THL.stride()[:2],
        *q_THY.stride()[:2],
        own.block,
        own.rotated_block,
        own.scale_block,
        batch.block_table_SC.stride(0),
        stride_token=own.token,
        HEADS=heads,
        TOKENS=tokens,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=tokens_held(cache),
        QUERIES=cut.queries,
        L=triton.next_power_of_2(rank),
        Y=max(16, triton.next_power_of_2(rope)),
        TILE=cut.keys,
        ITEMS=work[0].shape[1] == 8,
        TREE=batch.tree is not None,
        KV=own.KV,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(q_THL.device),
    )


def _aot(
    cut: Cut, heads: int, tokens: int, arch: str, *, items: bool, tree: bool = False, kv: str | None = None,
    lse: bool = False,
) -> AotKernel:  # fmt: skip
    """Return the entry of DeepSeek's latents, for so many heads."""
    kinds = {"table_ptr": "*i32", "work_ptr": "*i32", "counts_ptr": "*i32", "whose_ptr": "*i32"}
    kinds |= {"parts_ptr": "*fp32", "part_lse_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32", "stride_table": "i32"}
    kinds |= {"bits_ptr": "*i64", "base_ptr": "*i64"} | ({} if kv is None else {"cache_ptr": "*i16"})
    constants: dict[str, Any] = {
        "HEADS": heads, "TOKENS": tokens, "RANK": 512, "ROPE": 64, "stride_token": 576 if kv is None else 256,
        "BLOCK_SIZE": 64, "QUERIES": cut.queries, "L": 512, "Y": 64, "TILE": cut.keys, "ITEMS": items, "TREE": tree,
        "KV": kv,
    }  # fmt: skip
    constants |= {} if tree else dict.fromkeys(("bits_ptr", "base_ptr"))
    constants |= {} if lse else {"lse_ptr": None}
    constants |= {} if kv else dict.fromkeys(("r_ptr", "scale_ptr", "stride_r", "stride_scale"))
    names = [name for name in latent_kernel.arg_names if name not in constants and name != "PDL"]
    signature = {name: kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32:16") for name in names}
    return AotKernel(
        latent_kernel, signature, constants, num_warps=cut.warps, num_stages=cut.stages, archs=(arch,),
        tensor_cores="MMA", hot=cut.queries < 64,
    )  # fmt: skip


def _aot_combine(arch: str) -> AotKernel:
    signature = {"out_ptr": "*bf16", "start_ptr": "*i64", "whose_ptr": "*i32", "parts_ptr": "*fp32"}
    signature |= {"part_lse_ptr": "*fp32", "slices": "i32"}
    constants = {"lse_ptr": None, "HEADS": 128, "TOKENS": 1, "RANK": 512, "PARTS": 4, "COLUMNS": COMBINED // 4}
    return AotKernel(combine_kernel, signature, constants, num_warps=4, archs=(arch,), hot=True)


AOT = (
    _aot(Cut(16, 64, warps=8, stages=3), 16, 1, "sm_90", items=True),
    _aot(Cut(32, 64, warps=8, stages=3), 16, 2, "sm_90", items=True),
    _aot(Cut(64, 64, warps=8, stages=2), 128, 1, "sm_90", items=False),
    _aot(Cut(64, 64, warps=8, stages=2), 16, 4, "sm_90", items=True, tree=True),
    _aot(Cut(16, 16, warps=4, stages=1), 16, 1, "gfx942", items=True),
    _aot(Cut(32, 16, warps=4, stages=1), 128, 1, "gfx942", items=False),
    _aot(Cut(32, 16, warps=4, stages=1), 16, 4, "gfx942", items=True, tree=True),
    _aot(Cut(16, 64, warps=8, stages=3), 8, 1, "sm_90", items=True, lse=True),
    _aot(Cut(16, 64, warps=8, stages=3), 16, 1, "sm_90", items=True, kv="e4m3"),
    _aot(Cut(32, 64, warps=8, stages=3), 16, 2, "sm_90", items=True, kv="int8"),
    _aot(Cut(64, 64, warps=8, stages=2), 128, 1, "sm_90", items=True, kv="e4m3"),
    *(_aot_combine(arch) for arch in ONE_OF_EACH),
)
