"""Rows that verify drafts: the tokens that they emit are found in one launch behind the network. The legend is that of
verify.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_math import popcount
from ridgeline.kernels.step.op import SlotAdvance
from ridgeline.kernels.step.verify import DraftNodes, EmittedTokens

# Arguments that are packed into one buffer begin at any multiple of 4 bytes: one compilation serves all alignments.
_PACKED = ["token_ptr", "places_ptr", "num_logits_ptr", "slots_ptr"]
_PACKED += ["out_token_ptr", "out_finish_ptr", "out_drafted_ptr", "out_path_ptr"]


@triton.jit(do_not_specialize_on_alignment=_PACKED)
def _step_verify(
    token_ptr, places_ptr, num_logits_ptr, drafts_ptr, slots_ptr, new_len_ptr, active_ptr, stop_ids_ptr, max_len_ptr,
    kv_len_ptr, last_token_ptr, stopped_ptr, count_ptr, out_token_ptr, out_finish_ptr, out_drafted_ptr,
    tree_ptr, out_path_ptr,
    stride_places, stride_drafts, stop_stride, count_stride, stride_out, stride_tree, stride_path,
    N: tl.constexpr, NODES: tl.constexpr, K: tl.constexpr, E: tl.constexpr, STOPS: tl.constexpr, COUNT: tl.constexpr,
    TREE: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_verify`, one row per program. NODES and STOPS are powers of two that cover the N nodes and the E
    stop ids. Codes are those of `Finish`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    num_logits = tl.load(num_logits_ptr + row)
    new_len = tl.load(new_len_ptr + row)
    active = tl.load(active_ptr + row) != 0
    node = tl.arange(0, NODES)
    own = tl.full((NODES,), 1, tl.int64) << node
    known = node < tl.where(active, tl.minimum(num_logits, N), 0)
    if TREE:
        bits = tl.load(tree_ptr + slot * stride_tree + node, mask=known, other=1)
        depth, above = popcount(bits) - 1, bits ^ own  # the highest of the other bits is the parent's
        for far in tl.static_range(6):
            above = above | above >> (1 << far)
        above = popcount(above) - 1
        known = known & (depth < K)
    else:
        bits, depth, above = own + (own - 1), node, node - 1
    place_ptr = places_ptr + row * stride_places
    token = tl.load(token_ptr + tl.load(place_ptr + node, mask=known, other=0), mask=known, other=-1).to(tl.int64)
    later = known & (node > 0)
    wanted = tl.load(token_ptr + tl.load(place_ptr + above, mask=later, other=0), mask=later, other=-1).to(tl.int64)
    draft = tl.load(drafts_ptr + slot * stride_drafts + node - 1, mask=later, other=-1).to(tl.int64)
    proposed = later & (draft >= 0)
    right = (known & (node == 0)) | (proposed & (draft == wanted))
    if TREE:  # of equal siblings the first one
        older = right[None, :] & (above[None, :] == above[:, None]) & (node[None, :] < node[:, None])
        right = right & (tl.max(older.to(tl.int32), 1) == 0)

    stop = tl.arange(0, STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * stop_stride + stop, mask=stop < tl.where(active, E, 0), other=-1)
    stops = tl.sum((stop_ids[None, :] == token[:, None]).to(tl.int32), 1) > 0
    max_len = tl.load(max_len_ptr + slot)
    cached = new_len - num_logits  # before the first of these nodes
    full = cached + depth + 2 >= max_len
    code = tl.where(token < 0, 3, tl.where(stops, 1, tl.where(full, 2, 0)))

    all_right, all_ended = tl.sum(tl.where(right, own, 0), 0), tl.sum(tl.where(code != 0, own, 0), 0)
    reached = right & ((bits & ~all_right) == 0) & (((bits ^ own) & all_ended) == 0)
    emits = reached & (token >= 0)
    count = tl.sum(emits.to(tl.int32), 0)
    finish = tl.sum(tl.where(reached, code, 0), 0)  # one of them at most is not 0
    rest = (node >= count) & (node < K)
    tl.store(out_token_ptr + row * stride_out + depth, token.to(tl.int32), mask=emits)
    tl.store(out_token_ptr + row * stride_out + node, -1, mask=rest)
    if PATH:
        tl.store(out_path_ptr + row * stride_path + depth, node, mask=emits)
        tl.store(out_path_ptr + row * stride_path + node, -1, mask=rest)
    tl.store(out_finish_ptr + row, finish.to(tl.int8))
    tl.store(out_drafted_ptr + row, tl.sum(proposed.to(tl.int32), 0).to(tl.int8))
    length = cached + tl.maximum(count, tl.minimum(num_logits, 1))
    tl.store(kv_len_ptr + slot, length, mask=active & (new_len > 0))
    newest = tl.sum(tl.where(emits & (depth == count - 1), token, 0), 0)
    tl.store(last_token_ptr + slot, newest, mask=count > 0)
    tl.store(stopped_ptr + slot, 1, mask=finish != 0)
    if COUNT:
        tl.atomic_add(count_ptr + slot * count_stride + token, 1, mask=emits, sem="relaxed")


def step_verify(token_P: Tensor, nodes: DraftNodes, advance: SlotAdvance, emitted: EmittedTokens) -> None:
    """Compute `verify.step_verify`; token_P may be int32 too. The rows of all tables are contiguous."""
    places_RN, num_logits_R, drafts_SD, tree_SN = nodes
    token_RK, finish_R, drafted_R, path_RK = emitted
    (rows, count), width, counts_SV = places_RN.shape, advance.stop_ids_SE.shape[1], advance.output_count_SV
    padded = triton.next_power_of_2(count)
    _step_verify[(rows,)](
        token_P, places_RN, num_logits_R, drafts_SD, *advance, token_RK, finish_R, drafted_R, tree_SN, path_RK,
        places_RN.stride(0), drafts_SD.stride(0), advance.stop_ids_SE.stride(0),
        0 if counts_SV is None else counts_SV.stride(0), token_RK.stride(0),
        0 if tree_SN is None else tree_SN.stride(0), 0 if path_RK is None else path_RK.stride(0),
        N=count, NODES=padded, K=token_RK.shape[1], E=width, STOPS=triton.next_power_of_2(width),
        COUNT=counts_SV is not None, TREE=tree_SN is not None, PATH=path_RK is not None,
        num_warps=_warps(padded), **launch_options(token_P.device),
    )  # fmt: skip


def _warps(nodes: int) -> int:
    """Return the warps of a program, which compares all nodes with all stop ids."""
    return max(1, nodes // 16)


def _aot(nodes: int, *, count: bool, columns: int = 0) -> AotKernel:
    """Return the entry of rows with so many nodes. columns: of trees."""
    kinds = {
        "token_ptr": "*i64", "places_ptr": "*i32", "num_logits_ptr": "*i32", "drafts_ptr": "*i32", "slots_ptr": "*i32",
        "new_len_ptr": "*i64", "active_ptr": "*i1", "stop_ids_ptr": "*i64", "max_len_ptr": "*i64",
        "kv_len_ptr": "*i64", "last_token_ptr": "*i64", "stopped_ptr": "*i32", "count_ptr": "*i32",
        "out_token_ptr": "*i32", "out_finish_ptr": "*i8", "out_drafted_ptr": "*i8", "tree_ptr": "*i64",
        "out_path_ptr": "*i32", "stride_places": "i32", "stride_drafts": "i32", "stop_stride": "i32:16",
        "count_stride": "i32", "stride_out": "i32", "stride_tree": "i32", "stride_path": "i32",
    }  # fmt: skip
    padded, tree = triton.next_power_of_2(nodes), columns > 0
    constants: dict[str, int | None] = {"N": nodes, "NODES": padded, "K": columns or nodes}
    constants |= {"E": 64, "STOPS": 64, "COUNT": count, "TREE": tree, "PATH": tree}
    for name in (("count_ptr",) if not count else ()) + (("tree_ptr", "out_path_ptr") if not tree else ()):
        del kinds[name]
        constants[name] = None
    return AotKernel(_step_verify, kinds, constants, num_warps=_warps(padded), hot=True, archs=ONE_OF_EACH)


AOT = (
    _aot(6, count=False),
    _aot(6, count=True),
    _aot(17, count=True),
    _aot(32, count=True, columns=7),
    _aot(64, count=False, columns=17),
)
