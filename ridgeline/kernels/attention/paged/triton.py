"""Paged attention in Triton: short rows by split keys, long rows by query tiles, from one work list made on the device.

The host reads shapes only, so a captured graph serves any lengths. The legend is that of op.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.kernels.attention.paged.op import AttentionShape, Cascade, RaggedBatch, Schedule, Softmax, by_distance
from ridgeline.kernels.attention.paged.schedule import KEY_TILE, make_schedule
from ridgeline.kernels.attention.paged.triton_cascade import shared_kernel, shared_options
from ridgeline.kernels.attention.paged.triton_common import LOG2E
from ridgeline.kernels.attention.paged.triton_decode import decode_kernel
from ridgeline.kernels.attention.paged.triton_prefill import prefill_kernel
from ridgeline.kernels.attention.paged.widen import make_widening, widen
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.kv_cache import LEVELS, KernelCache, KVScales, for_kernels
from ridgeline.kernels.base.launch import compute_capability, launch_options
from ridgeline.kernels.base.tree import NODES
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.plain.rounded import Rounded

COMBINED = 8192  # float32 values of parts that a program holds at once when it adds them up
TOGETHER = 8  # queries of rows with equally many tokens whose parts it adds up at once


@dataclass(frozen=True)
class Config:
    """The keys of a tile, the compiler's options, and the least columns of decode's products: 16 for those of a
    warpgroup, 8 for those of single warps, which take levels from registers as they are converted."""

    tile: int
    num_warps: int
    num_stages: int
    queries: int = 16


def decode_config(head_dim: int, itemsize: int, queries: int = 16) -> Config:
    """Return key tiles of up to 16 KiB (AMD: 8 KiB). Three stages of two programs then fit a Hopper multiprocessor, and
    two stages a CDNA one. Tiles of levels are half as large, so one stage more is under way. Many queries, which lie in
    shared memory too, leave room for a stage less."""
    dim = triton.next_power_of_2(head_dim)
    if torch.version.hip is not None:
        return Config(max(16, min(KEY_TILE, 8192 // (dim * itemsize))), num_warps=4, num_stages=2)
    tile = max(16, min(KEY_TILE, 16384 // (dim * itemsize)))
    if itemsize == 1:
        return Config(tile, num_warps=4, num_stages=4, queries=8)
    used = itemsize * (3 * 2 * tile * dim + queries * (dim + tile))  # keys, values, queries and probabilities
    return Config(tile, num_warps=4, num_stages=3 if used <= 114 << 10 else 2)


def decode_warps(num_warps: int, k_cache_NGPD: Tensor, kv: str | None) -> int:
    """Return the warps of a program of the decode kernel; `num_warps` is the choice for aligned keys.

    On Hopper products of a warpgroup take the softmax's weights from shared memory. Where keys begin at no multiple of
    16 elements, none are copied ahead, and the weights later lie in the keys' place. ptxas 12.8, which Triton 3.6 has,
    then takes their descriptor from a register that it never writes: an illegal access, with heads of 40. Fewer warps
    than a warpgroup multiply without descriptors. Levels are copied ahead wherever they begin.
    """
    strides, device = k_cache_NGPD.stride()[:3], k_cache_NGPD.device
    aligned = kv is not None or k_cache_NGPD.element_size() != 2 or all(stride % 16 == 0 for stride in strides)
    return num_warps if aligned or compute_capability(device) != (9, 0) else 2


def prefill_config(head_dim: int, itemsize: int, block_size: int, device: torch.device) -> Config:
    """Return tiles that leave the accumulator and the scores in registers, and stages that fit the shared memory."""
    if head_dim > 256:  # a tile's queries then take 64 KiB, and their sums half of all registers
        return Config(16, num_warps=8, num_stages=1 if itemsize > 2 or torch.version.hip is not None else 2)
    if torch.version.hip is not None:
        return Config(16 if itemsize > 2 else 32 if head_dim > 128 else 64, num_warps=8, num_stages=1)
    if itemsize > 2:
        return Config(32, num_warps=8, num_stages=2)
    hopper = compute_capability(device) >= (9, 0)
    if head_dim > 128:
        return Config(64 if hopper else 32, num_warps=8, num_stages=2)
    if hopper and head_dim > 64 and block_size % 128 == 0:  # a tile in one block has few addresses, so more keys fit
        return Config(128, num_warps=8, num_stages=3)
    return Config(64, num_warps=8, num_stages=3)


def paged_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    scales: KVScales | None = None,
    buffer: Rounded | None = None,
    lse_TH: Tensor | None = None,
) -> Tensor:
    """Compute `op.paged_attention_reference`. Returns a contiguous [T, H, D], or where all rows are short and heads 128
    wide the numbers in `buffer`, in E4M3.

    lse_TH: float32, where the natural logarithms of the softmax's sums are written, of rows that see any key.

    Block sizes are powers of two, both caches have the same strides, and elements of a head are contiguous. Cells that
    no query sees may hold NaN.
    """
    scale, softcap, sinks_H, _, window, _ = softmax
    slopes, alibi = by_distance(softmax)
    (num_tokens, num_heads, head_dim), (_, num_kv_heads, block_size, _) = q_THD.shape, k_cache_NGPD.shape
    if q_THD.stride(2) != 1:
        raise ValueError("paged attention: contiguous heads of queries expected")
    cache = for_kernels(k_cache_NGPD, v_cache_NGPD, scales)
    schedule = batch.schedule
    if schedule is None:
        of_layers = AttentionShape(
            num_tokens=num_tokens,
            tokens_each=batch.tokens_each,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            cache_NGPD=k_cache_NGPD if softcap is None and not alibi else None,
            head_bytes=head_dim * q_THD.element_size(),
            trees=batch.tree is not None,
            ahead=batch.ahead_T is not None,
        )
        schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)
    elif schedule.window != window:
        raise ValueError(f"paged attention: window {window}, schedule made for {schedule.window}")
    elif batch.tree is not None and not schedule.trees:
        raise ValueError("paged attention: make schedules with trees for batches that have them")
    rounds = buffer is not None and head_dim == BLOCK and 0 < batch.tokens_each <= schedule.few and not schedule.fixed
    out_THD = buffer.q_TI.view(q_THD.shape) if buffer is not None and rounds else q_THD.new_empty(q_THD.shape)
    group = num_heads // num_kv_heads
    tensors = q_THD, *cache.tensors, out_THD, batch.block_table_SC
    strides = q_THD.stride()[:2] + cache.strides + batch.block_table_SC.stride()[:1]
    numbers = scale * LOG2E.value, softcap or 0.0, window or 0, *strides, *cache.scale_strides
    shared = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": max(cache.least_dim, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "WINDOW": window is not None,
        "SINKS": sinks_H is not None,
        "SOFTCAP": softcap is not None,
        "ALIBI": alibi,
        "TREE": batch.tree is not None,
        "AHEAD": batch.ahead_T is not None,
        "LSE": lse_TH is not None,
        "KV": cache.KV,
        **launch_options(q_THD.device),
    }
    any_pointer = schedule.counts_2  # where none is read or written
    tree = (None, None) if batch.tree is None else batch.tree
    ahead, lse = batch.ahead_T, any_pointer if lse_TH is None else lse_TH
    given = any_pointer if sinks_H is None else sinks_H, slopes, *tree, ahead, lse
    counts_R = batch.num_tokens_R  # if the host knows them, it skips launches that would have nothing to do
    if not schedule.fixed and (counts_R is None or (counts_R <= schedule.few).any()):
        together = min(TOGETHER, batch.tokens_each * group)
        _decode(schedule, tensors, given, numbers, shared, buffer if rounds else None, max(group, together))
    if rounds:
        return out_THD
    if counts_R is not None and not (counts_R > schedule.few).any():
        return out_THD
    if schedule.hopper is not None:
        if softcap is not None or alibi:
            raise ValueError("paged attention: make schedules without cache_NGPD for layers with softcap or slopes")
        from ridgeline.kernels.attention.paged.hopper import prefill_attention

        keys_values, widened, fits = (k_cache_NGPD, v_cache_NGPD), batch, schedule.hopper.certain
        if batch.wide is not None:
            keys_values, (widened, fits) = batch.wide, _widened(batch, schedule, cache, block_size)
        prefill_attention(q_THD, keys_values, widened, schedule.hopper, softmax, out_THD, lse_TH=lse_TH)
        if fits:
            return out_THD
    if len(schedule.tiles_J4):
        _prefill(schedule, tensors, given, numbers, shared)
    return out_THD


def _widened(batch: RaggedBatch, schedule: Schedule, cache: KernelCache, block_size: int) -> tuple[RaggedBatch, bool]:
    """Widen the long rows' keys and values of this layer. Returns the batch that finds them, and whether all of them
    surely fit; otherwise the device knows it."""
    assert batch.wide is not None
    capacity = most = len(batch.wide[0])
    if batch.num_tokens_R is not None and batch.kv_bound_R is not None:
        most = int((-(-batch.kv_bound_R[batch.num_tokens_R > schedule.few] // block_size)).sum())
    if "widening" not in batch.derived:  # made for all layers
        batch.derived["widening"] = make_widening(batch, schedule, block_size, capacity)
    widening = batch.derived["widening"]
    widen(widening, cache, batch.wide, min(most, capacity))
    known = batch.num_tokens_R is not None and batch.kv_bound_R is not None and most <= capacity
    return replace(batch, block_table_SC=widening.table_SC), known


def _decode(
    schedule: Schedule, tensors: tuple, given: tuple, numbers: tuple, shared: dict[str, Any], buffer: Rounded | None,
    together: int,
) -> None:  # fmt: skip
    """Attend with the short rows. together: of how many queries a program adds up the parts at once, at least."""
    q_THD, (sinks, slopes, bits_T, base_T, ahead_T, lse) = tensors[0], given
    group, kv_heads, together = shared["GROUP"], shared["NUM_KV_HEADS"], triton.next_power_of_2(together)
    queries = triton.next_power_of_2(schedule.few * group)
    config = decode_config(q_THD.shape[2], tensors[1].element_size() if shared["KV"] is None else 1, queries)
    parts = len(schedule.items_I8) * kv_heads * schedule.few * group
    cascade, shared_parts = schedule.cascade, (sinks, sinks)  # any pointers will do: they are not read
    if cascade is not None:
        shared_parts = _attend_to_shared(cascade, tensors, slopes, numbers, shared)
    decode_kernel[(len(schedule.items_I8) * kv_heads,)](
        *tensors[:-1],
        None if buffer is None else buffer.scale,
        tensors[-1],
        schedule.items_I8,
        schedule.counts_2,
        schedule.arrivals,
        torch.empty(parts, q_THD.shape[2], dtype=torch.float32, device=q_THD.device),
        torch.empty(parts, dtype=torch.float32, device=q_THD.device),
        sinks,
        slopes,
        bits_T,
        base_T,
        ahead_T,
        cascade.items_I3 if cascade else sinks,
        *shared_parts,
        lse,
        *numbers,
        len(q_THD),
        ROUND=buffer is not None,
        FEW=schedule.few,
        QUERIES=max(config.queries, queries),
        TILE=config.tile,
        TOGETHER=together,
        PARTS=max(1, min(16, COMBINED // (together * shared["DIM"]))),
        CASCADE=cascade is not None,
        num_warps=decode_warps(config.num_warps, tensors[1], shared["KV"]),
        num_stages=config.num_stages,
        **shared,
    )


def _attend_to_shared(
    cascade: Cascade, tensors: tuple, slopes: Tensor | None, numbers: tuple, shared: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the parts of rows that read keys together, and the logarithms of their sums."""
    if slopes is not None and cascade.positions_R is None:
        raise ValueError("paged attention: make schedules with alibi for layers with slopes")
    q_THD, *cache, _, block_table_SC = tensors
    scale, softcap, _, *strides = numbers
    config = decode_config(q_THD.shape[2], cache[0].element_size())
    kv_heads, parts = shared["NUM_KV_HEADS"], cascade.max_parts * q_THD.shape[1]
    part_values = torch.empty(parts, q_THD.shape[2], dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty(parts, dtype=torch.float32, device=q_THD.device)
    shared_kernel[(len(cascade.stretches_I6) * kv_heads,)](
        q_THD,
        *cache,
        block_table_SC,
        cascade.stretches_I6,
        cascade.count_1,
        cascade.members_R,
        cascade.positions_R,
        slopes,
        part_values,
        part_lse,
        scale,
        softcap,
        *strides,
        QUERIES=cascade.queries,
        TILE=config.tile,
        **shared_options(cascade.queries, q_THD.shape[2]),
        **{name: value for name, value in shared.items() if name not in ("WINDOW", "SINKS", "LSE", "TREE", "AHEAD")},
    )
    return part_values, part_lse


def _prefill(schedule: Schedule, tensors: tuple, given: tuple, numbers: tuple, shared: dict[str, Any]) -> None:
    q_THD, words = tensors[:2]
    config = prefill_config(
        q_THD.shape[2], max(words.element_size(), q_THD.element_size()), words.shape[2], q_THD.device
    )
    queries = max(16, triton.next_power_of_2(schedule.tile_tokens * shared["GROUP"]))
    prefill_kernel[(len(schedule.tiles_J4) * shared["NUM_KV_HEADS"],)](
        *tensors,
        schedule.tiles_J4,
        schedule.counts_2,
        *given,
        *numbers,
        QUERIES=queries,
        TILE=min(config.tile, NODES) if shared["TREE"] else config.tile,
        FIXED=schedule.fixed,
        num_warps=config.num_warps if queries > 64 or q_THD.shape[2] > 256 else 4,
        num_stages=config.num_stages,
        **shared,
    )


def _aot(
    kernel: Any, config: Config, tensor_cores: str, dim: int = 512, kv: str | None = None,
    archs: tuple[str, ...] = ONE_OF_EACH, rounds: bool = False, hot: bool = False, **constants: Any,
) -> AotKernel:  # fmt: skip
    """Return the entry of one kernel for 64 heads of `dim`, eight of which share a key head."""
    tables, parts = (
        ("table_ptr", "items_ptr", "tiles_ptr", "counts_ptr", "arrivals_ptr"),
        ("parts_ptr", "part_lse_ptr", "lse_ptr"),
    )
    kinds = dict.fromkeys(tables, "*i32") | dict.fromkeys(parts, "*fp32")
    kinds |= {"bits_ptr": "*i64", "base_ptr": "*i64", "ahead_ptr": "*i32"}
    absent = [
        "sinks_ptr",
        "slopes_ptr",
        *([] if constants.get("LSE") else ["lse_ptr"]),
        *([] if constants.get("TREE") else ["bits_ptr", "base_ptr"]),
        *([] if constants.get("AHEAD") else ["ahead_ptr"]),
        *(name for name in kernel.arg_names if name.startswith("shared_")),
    ]
    scales = [name for name in kernel.arg_names if "scale_" in name and name != "out_scale_ptr"]
    absent += ([] if kv else scales) + ([] if rounds else ["out_scale_ptr"])
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in absent]
    signature = {name: kinds.get(name, "*bf16") for name in pointers}
    signature |= {"scale": "fp32", "softcap": "fp32", "window": "i32", "stride_table": "i32"}
    signature |= {f"stride_{name}": "i32:16" for name in ("q_token", "q_head", "block", "head", "token")}
    if "ROUND" in kernel.arg_names:
        signature |= {"num_tokens": "i32"} | ({"out_ptr": "*fp8e4nv", "out_scale_ptr": "*fp32"} if rounds else {})
        constants["ROUND"] = rounds
    if kv:
        signature |= {"k_ptr": "*i16", "v_ptr": "*i16", "scale_ptr": "*i32"}
        signature |= {"stride_scale_block": "i32:16", "stride_scale_head": "i32:16"}
    constants = {
        "LSE": False, "TREE": False, "AHEAD": False, **constants,
        "NUM_KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": dim, "DIM": dim, "BLOCK_SIZE": 64, "TILE": config.tile,
        "WINDOW": False, "SINKS": False, "SOFTCAP": False, "ALIBI": False, "KV": kv,
        **({"stride_scale_token": 1} if kv else {}),
        **{name: None for name in absent if name in kernel.arg_names},
    }  # fmt: skip
    return AotKernel(
        kernel, signature, constants, num_warps=config.num_warps, num_stages=config.num_stages,
        tensor_cores=tensor_cores, archs=archs, hot=hot,
    )  # fmt: skip


def _aot_decode(
    config: Config, kv: str, queries: int, archs: tuple[str, ...], *, rounds: bool = False
) -> AotKernel:  # fmt: skip
    cut: dict[str, Any] = {"QUERIES": queries, "FEW": 1, "TOGETHER": 8, "PARTS": 8, "CASCADE": False}
    return _aot(decode_kernel, config, "MMA", 128, kv, archs, rounds, **cut)


def _aot_verify(
    dim: int, kv: str | None, tokens: int, rows: int, archs: tuple[str, ...], *, tree: bool = False
) -> AotKernel:
    """Return the entry of rows that verify drafts. rows: of the products."""
    config = decode_config(dim, 1 if kv else 2, rows)
    cut: dict[str, Any] = {"QUERIES": rows, "FEW": tokens, "TOGETHER": TOGETHER, "CASCADE": False, "TREE": tree}
    cut["PARTS"] = max(1, COMBINED // (TOGETHER * dim))
    return _aot(decode_kernel, config, "MMA", dim, kv, archs, hot=rows <= 32, **cut)


AOT = (
    _aot(prefill_kernel, Config(16, num_warps=8, num_stages=2), "HGMMA", QUERIES=64, FIXED=False),
    _aot(decode_kernel, decode_config(512, 2), "MMA", QUERIES=16, FEW=2, TOGETHER=8, PARTS=2, CASCADE=False),
    *(_aot_decode(decode_config(128, 1), kv, 8, ("sm_90",)) for kv in LEVELS.values()),
    _aot_decode(decode_config(128, 1), "e4m3", 8, ("sm_90",), rounds=True),
    _aot_decode(Config(64, num_warps=4, num_stages=2), "e4m3", 16, ("gfx942",)),
    _aot(prefill_kernel, Config(64, num_warps=8, num_stages=3), "HGMMA", 128, "e4m3", QUERIES=128, FIXED=False),
    _aot(prefill_kernel, Config(64, num_warps=8, num_stages=3), "HGMMA", 64, "int8", QUERIES=128, FIXED=False),
    _aot(prefill_kernel, Config(64, num_warps=8, num_stages=3), "HGMMA", 128, QUERIES=128, FIXED=False, LSE=True),
    _aot(
        decode_kernel,
        decode_config(128, 2),
        "MMA",
        128,
        QUERIES=16,
        FEW=2,
        TOGETHER=8,
        PARTS=8,
        CASCADE=False,
        LSE=True,
    ),
    _aot_verify(128, None, 6, 64, ONE_OF_EACH),
    _aot_verify(128, "e4m3", 6, 64, ONE_OF_EACH),
    _aot_verify(128, None, 4, 32, ("sm_90",)),
    _aot_verify(512, None, 4, 32, ("sm_90",)),
    _aot_verify(128, None, 8, 64, ONE_OF_EACH, tree=True),
    _aot_verify(128, "e4m3", 8, 64, ("sm_90",), tree=True),
    _aot(
        prefill_kernel, Config(64, num_warps=8, num_stages=3), "HGMMA", 128, archs=("sm_90",),
        QUERIES=128, FIXED=False, TREE=True,
    ),
    _aot(
        prefill_kernel, Config(64, num_warps=8, num_stages=1), "HGMMA", 128, archs=("gfx942",),
        QUERIES=128, FIXED=False, TREE=True,
    ),
    _aot(
        prefill_kernel, Config(64, num_warps=8, num_stages=2), "HGMMA", 256, archs=("sm_90",),
        QUERIES=128, FIXED=False, AHEAD=True,
    ),
)  # fmt: skip
