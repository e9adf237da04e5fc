"""A decode step's attention in one launch. The host reads shapes only. The legend is that of op.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ridgeline.kernels.attention.decode.op import composed
from ridgeline.kernels.attention.decode.triton_fused import fused_kernel
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, Softmax
from ridgeline.kernels.attention.paged.schedule import KEY_TILE, make_schedule
from ridgeline.kernels.attention.paged.triton import COMBINED, decode_config, paged_attention
from ridgeline.kernels.attention.paged.triton_common import LOG2E
from ridgeline.kernels.base.aot import ARCHS, AotKernel
from ridgeline.kernels.base.kv_cache import LEVELS, KVScales, for_kernels
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.fp8.rounding import round_into
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.kernels.small.rotary.triton import rope_kv, rope_kv_batch_invariant

# With more rows reading keys decides, and the plain kernel keeps more programs on a multiprocessor. One launch tied
# with two at 64 rows, and was not faster at 256 (docs/log.md).
MANY_ROWS = 64
WIDEST = 256  # heads that are wider do not fit the registers in all the forms that the kernel keeps of them


def _attend(
    q_THD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, batch: RaggedBatch, softmax: Softmax, scales: KVScales | None,
    buffer: Rounded | None,
) -> Tensor:  # fmt: skip
    """Compute `paged_attention`, rounded where there is room."""
    out_THD = paged_attention(q_THD, k_NGPD, v_NGPD, batch, softmax, scales, buffer)
    if buffer is None or out_THD.dtype == buffer.q_TI.dtype:
        return out_THD
    round_into(out_THD.flatten(1), buffer)
    return buffer.q_TI.view_as(out_THD)


in_two_launches = composed(rope_kv, _attend)
batch_invariant = composed(rope_kv_batch_invariant, _attend)


@dataclass(frozen=True)
class Config:
    """The cut of the kernel.

    tile: keys of a tile.
    queries: the least columns of the matrix products. 8 gives products of a warp, 16 those of a warpgroup where there
        are any.
    num_warps, num_stages: options of the compiler.
    """

    tile: int
    queries: int
    num_warps: int
    num_stages: int


def config(num_rows: int, group: int, head_dim: int, itemsize: int, block_size: int) -> Config:
    """Return the cut for a step.

    One row is bound by latency and takes large tiles. More rows are bound by reading keys and take tiles that leave
    room for two or more programs on a multiprocessor, which hide each other's latency. Both use products of single
    warps, except for large heads in large groups. There these would leave room for a third program, and programs would
    be unevenly spread (8B at 16 rows: 23.7 µs a layer with 8 columns, 19.5 with 16; docs/log.md).
    """
    plain, hip = decode_config(head_dim, itemsize), torch.version.hip is not None
    dim = max(16, triton.next_power_of_2(head_dim))
    if hip or itemsize > 2 or dim > 128:
        return Config(plain.tile, 16, plain.num_warps, plain.num_stages)
    if num_rows == 1 and KEY_TILE % block_size == 0:
        return Config(2 * KEY_TILE, 8, num_warps=max(4, dim // 16), num_stages=2)
    if dim > 64 and group > 2 and itemsize > 1:
        return Config(plain.tile, 16, plain.num_warps, plain.num_stages)
    return Config(KEY_TILE, 8, num_warps=4, num_stages=plain.num_stages)


def decode_attention(
    projected: Projected,
    batch: RaggedBatch,
    softmax: Softmax,
    buffer: Rounded | None = None,
) -> Tensor:
    """Compute `op.decode_attention`. Returns a contiguous [T, H, D]. The caches must be as `triton.paged_attention`
    wants them. Cells that no query sees may hold NaN."""
    (
        qkv_TX, q_norm_D, k_norm_D, eps, cos_sin_ZY, positions_T, k_cache_NGPD, v_cache_NGPD, place_T, num_heads,
        num_kv_heads, v_norm, scales,
    ) = projected  # fmt: skip
    scale, softcap, sinks_H, slopes_H, window, bias_HL = softmax
    num_rows, head_dim = len(batch.slots_R), k_cache_NGPD.shape[3]
    if batch.tokens_each != 1:
        raise ValueError(f"decode attention: one token a row expected, got {batch.tokens_each or 'different numbers'}")
    schedule, options = batch.schedule, launch_options(qkv_TX.device)
    if schedule is None:
        of_layers = AttentionShape(
            num_tokens=num_rows, tokens_each=1, num_heads=num_heads, num_kv_heads=num_kv_heads, window=window
        )
        schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)
        if options["PDL"]:
            # The schedule was made just now and must be complete before the kernel starts. So the kernel is launched
            # strictly. PDL stays on, since without it the compiler's error comes back that `held` avoids.
            options["launch_pdl"] = False
    if (
        schedule.fixed
        or schedule.cascade is not None
        or num_rows > MANY_ROWS
        or batch.tree is not None
        or bias_HL is not None  # of the row's own key too, which is not among the tiles
        or head_dim > WIDEST
        or (buffer is not None and head_dim != BLOCK)
    ):
        return in_two_launches(projected, batch, softmax, buffer)
    if schedule.few != 1 or schedule.window != window:
        raise ValueError(
            f"decode attention: one token a row, window {window}; "
            f"the schedule was made for up to {schedule.few} tokens a row and window {schedule.window}"
        )
    if qkv_TX.stride(1) != 1:
        raise ValueError("decode attention: contiguous rows of projections expected")
    cache = for_kernels(k_cache_NGPD, v_cache_NGPD, scales)
    group, block_size, device = num_heads // num_kv_heads, k_cache_NGPD.shape[2], qkv_TX.device
    dim, heads = max(cache.least_dim, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    cut = config(num_rows, group, head_dim, k_cache_NGPD.element_size(), block_size)
    programs = len(schedule.items_I8) * num_kv_heads
    shape = num_rows, num_heads, head_dim
    out_THD = torch.empty(shape, dtype=qkv_TX.dtype, device=device) if buffer is None else buffer.q_TI.view(shape)
    fused_kernel[(programs,)](
        qkv_TX,
        q_norm_D,
        k_norm_D,
        cos_sin_ZY,
        positions_T,
        place_T,
        *cache.tensors,
        None if scales is None else scales.saturated_1,
        out_THD,
        None if buffer is None else buffer.scale,
        batch.block_table_SC,
        schedule.items_I8,
        schedule.arrivals,
        torch.empty(programs * group, head_dim, dtype=torch.float32, device=device),
        torch.empty(programs * group, dtype=torch.float32, device=device),
        sinks_H,
        slopes_H,
        eps,
        scale * LOG2E.value,
        softcap or 0.0,
        window or 0,
        qkv_TX.stride(0),
        *cache.strides,
        batch.block_table_SC.stride(0),
        *cache.scale_strides,
        num_rows,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        ROTATED=0 if cos_sin_ZY is None else cos_sin_ZY.shape[1],
        BLOCK_SIZE=block_size,
        QUERIES=max(cut.queries, heads),
        TILE=cut.tile,
        HEADS=heads,
        PARTS=max(1, min(16, COMBINED // (heads * dim))),
        NORM=q_norm_D is not None,
        V_NORM=v_norm,
        VALUES_ARE_KEYS=qkv_TX.shape[1] == (num_heads + num_kv_heads) * head_dim,
        WINDOW=window is not None,
        SINKS=sinks_H is not None,
        SOFTCAP=softcap is not None,
        ALIBI=slopes_H is not None,
        KV=cache.KV,
        ROUND=buffer is not None,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **options,
    )
    return out_THD


def _aot(
    rows: int, heads: int, kv_heads: int, head_dim: int, *,
    norm: bool = False, rotate: bool = True, alibi: bool = False,
    sinks: bool = False, v_norm: bool = False, window: bool = False, kv: str | None = None, amd: bool = False,
    rounds: bool = False,
    archs: tuple[str, ...] = ARCHS,
) -> AotKernel:  # fmt: skip
    pointers = (
        "qkv", "q_norm", "k_norm", "cos_sin", "positions", "place", "k", "v", "out", "table", "items",
        "arrivals", "parts", "part_lse", "sinks", "slopes",
    )  # fmt: skip
    kinds = dict.fromkeys(("cos_sin", "parts", "part_lse", "slopes"), "*fp32")
    kinds |= dict.fromkeys(("positions", "place"), "*i64") | dict.fromkeys(("table", "items", "arrivals"), "*i32")
    signature = {f"{name}_ptr": kinds.get(name, "*bf16") for name in pointers}
    signature |= {"eps": "fp32", "scale": "fp32", "softcap": "fp32", "window": "i32"}
    signature["num_rows"] = "i32"
    if rounds:
        signature |= {"out_ptr": "*fp8e4nv", "out_scale_ptr": "*fp32"}
    signature |= {f"stride_{name}": "i32:16" for name in ("qkv", "block", "head", "token")} | {"stride_table": "i32"}
    group = heads // kv_heads
    cut = config(rows, group, head_dim, 1 if kv else 2, 64)
    cut = replace(cut, queries=16, num_stages=2) if amd else cut
    constants = {
        "NUM_KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "DIM": triton.next_power_of_2(head_dim),
        "ROTATED": head_dim if rotate else 0, "BLOCK_SIZE": 64, "QUERIES": max(cut.queries, group), "TILE": cut.tile,
        "HEADS": triton.next_power_of_2(group), "PARTS": 8, "NORM": norm, "V_NORM": v_norm, "VALUES_ARE_KEYS": False,
        "WINDOW": window, "SINKS": sinks, "SOFTCAP": False, "ALIBI": alibi, "KV": kv, "ROUND": rounds,
    }  # fmt: skip
    given = {"q_norm_ptr": norm, "k_norm_ptr": norm, "cos_sin_ptr": rotate, "slopes_ptr": alibi}
    given["sinks_ptr"] = sinks
    for name in (name for name, is_given in given.items() if not is_given):
        del signature[name]
        constants[name] = None
    if kv:
        signature |= {"k_ptr": "*i16", "v_ptr": "*i16", "scale_ptr": "*i32"}
        signature |= {"stride_scale_block": "i32:16", "stride_scale_head": "i32:16"}
        constants["stride_scale_token"] = 1
    for name in (
        "scale_ptr",
        "out_scale_ptr",
        "saturated_ptr",
        "stride_scale_block",
        "stride_scale_head",
        "stride_scale_token",
    ):
        if name not in signature:
            constants.setdefault(name, None)
    return AotKernel(
        fused_kernel, signature, constants,
        num_warps=cut.num_warps, num_stages=cut.num_stages, hot=True, archs=archs,
        tensor_cores="MMA" if cut.queries < 16 else "HGMMA",  # later compilers use warpgroups for 8 columns too
    )  # fmt: skip


AOT = (
    _aot(1, 32, 8, 64),
    _aot(64, 32, 8, 64),
    _aot(64, 32, 8, 128),
    _aot(1, 16, 8, 128, norm=True),
    _aot(64, 16, 8, 128, norm=True),
    _aot(64, 32, 32, 128, rotate=False, alibi=True),
    _aot(64, 64, 8, 64, sinks=True, window=True, archs=("sm_90", "gfx942")),
    *(_aot(64, 32, 8, 128, kv=kv, archs=("sm_90",)) for kv in LEVELS.values()),
    _aot(1, 32, 8, 128, kv="e4m3", archs=("sm_90",)),
    _aot(64, 32, 8, 128, kv="e4m3", rounds=True, archs=("sm_90",)),
    _aot(1, 16, 8, 64, norm=True, kv="int8", archs=("sm_90",)),
    _aot(64, 32, 8, 128, kv="e4m3", amd=True, archs=("gfx942",)),
)
