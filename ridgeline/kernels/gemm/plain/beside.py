"""The first products of adapters beside a linear map's own: x by the first matrices, in one launch in front of the
linear map's, which multiplies what comes here by the second ones and adds it to its own sums.

Nothing is sorted: a token takes its own adapter's products, and products of others' are left out.

`thin_rows_kernel` is for as few tokens as rows.py is: a program has one row of a matrix and one token, and norms it
too. The linear map's programs ask for their weights while it runs, and wait for it.

`thin_panels_kernel` multiplies tiles of tokens by panels of 64 neighbouring columns of all adapters, if the step has an
adapter there. Programs share the inputs, and the last to arrive adds up. With dependent launch this kernel tells the
linear map's programs when x is there. So these begin with x, run beside it, and wait for it where their own inputs end.
Its programs are few enough to leave them their multiprocessors.

Legend, beside that of op.py:
    B  inputs of a block
    M  tokens of a tile
    C  columns of a panel
    H  parts times ranks (`for_rows`), or parts times columns of all panels (`for_panels`)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.counters import COUNTERS, counters
from ridgeline.kernels.base.launch import INTERPRETED, launch_options
from ridgeline.kernels.gemm.lora.op import MOST_PARTS, PANEL, AdapterFactors, StepFactors, num_panels
from ridgeline.kernels.gemm.plain.blocks import summed
from ridgeline.kernels.gemm.plain.choose import power_of_two
from ridgeline.kernels.gemm.plain.op import Operand

BLOCK, STAGES = 128, 6  # inputs of a block of thin_panels_kernel, and blocks under way at once
DEPTH = 4  # blocks of thin_rows_kernel that are under way at once
SHARE, MOST_SHARES = 256, 32  # inputs of a program at least, and programs of a tile at most
MOST_SUMS = 1 << 26  # bytes that programs share: no step has room for many more beside its activations
MOST_AT_ONCE = 8  # sums that are loaded together: more would not fit the registers
PROGRAMS = 132  # that a GPU holds at once, at most
MOST_BLOCKS, FEW_BLOCKS = 32, 7  # of a program beside the linear map's, or in the places of some of them
MOST_PLACES = COUNTERS // 2  # tiles of all parts and panels whose inputs may be shared
FAR = 1 << 30  # the end of a part that is not there


def ends(factors: AdapterFactors) -> tuple[int, int, int]:
    """Return the ends of the first three parts, `FAR` of those that are not there, or that are the last one."""
    found, end = [FAR] * (MOST_PARTS - 1), 0
    for part, outputs in enumerate(factors.parts[:-1]):
        end += outputs
        found[part] = end
    first, second, third = found
    return first, second, third


@triton.jit(do_not_specialize=["token_stride"])
def thin_rows_kernel(
    x_ptr, residual_ptr, norm_ptr, down_ptr, rank_ptr, adapter_ptr, h_ptr, token_stride, residual_stride, eps,
    inputs: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one number of h [T, H], 0 of a token without an adapter and behind the adapter's rank. Which token has
    which adapter is known before the step's first kernel with dependent launch."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, token = tl.program_id(0), tl.program_id(1)
    STEPS: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    AHEAD: tl.constexpr = DEPTH if DEPTH < STEPS else STEPS
    adapter = tl.load(adapter_ptr + token)
    rank = tl.load(rank_ptr + adapter - 1, mask=adapter > 0, other=0)
    width = tl.where(row % MOST < rank, inputs, 0)  # nothing is read of a row that does not count
    input_B = tl.arange(0, BLOCK)
    down_ptr_B = down_ptr + ((adapter - 1).to(tl.int64) * (PARTS * MOST) + row) * inputs + input_B
    w_B = ()
    n_B = ()
    for step in tl.static_range(AHEAD):
        kept_B = input_B + step * BLOCK < width
        w_B += (tl.load(down_ptr_B + step * BLOCK, mask=kept_B, other=0),)  # type: ignore[assignment]
        if NORM:
            n_B += (tl.load(norm_ptr + input_B + step * BLOCK, mask=kept_B, other=0),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc_B = tl.zeros((BLOCK,), tl.float32)
    squares_B = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        here_B = input_B + step * BLOCK
        at_B = token.to(tl.int64) * token_stride + here_B
        residual_B = token.to(tl.int64) * residual_stride + here_B
        a_B = summed(x_ptr, residual_ptr, at_B, residual_B, here_B < width, RESIDUAL).to(tl.float32)
        if NORM:
            squares_B += a_B * a_B
            a_B *= n_B[0].to(tl.float32)  # type: ignore[misc]
        acc_B += w_B[0].to(tl.float32) * a_B  # type: ignore[misc]
        w_B = w_B[1:]
        n_B = n_B[1:]
        if step + AHEAD < STEPS:
            kept_B = input_B + (step + AHEAD) * BLOCK < width
            w_B += (tl.load(down_ptr_B + (step + AHEAD) * BLOCK, mask=kept_B, other=0),)  # type: ignore[assignment]
            if NORM:
                next_ptr_B = norm_ptr + input_B + (step + AHEAD) * BLOCK
                n_B += (tl.load(next_ptr_B, mask=kept_B, other=0),)  # type: ignore[assignment]
    h = tl.sum(acc_B, 0)
    if NORM:
        h *= tl.rsqrt(tl.sum(squares_B, 0) / inputs + eps)
    tl.store(h_ptr + token * (PARTS * MOST) + row, h.to(h_ptr.dtype.element_ty))


def for_rows(x: Operand, adapters: StepFactors) -> dict[str, Any]:
    """Launch `thin_rows_kernel`. Return what the kernels of rows.py take of it."""
    (x_TI, residual_TI, norm_weight_I, eps), (factors, step) = x, adapters
    (tokens, inputs), (_, _, most) = x_TI.shape, factors.up_AOR.shape
    rows = factors.down_AKI.shape[1]
    h_TH = torch.empty(tokens, rows, dtype=x_TI.dtype, device=x_TI.device)
    residual = x_TI if residual_TI is None else residual_TI
    block = min(4096, power_of_two(inputs))
    thin_rows_kernel[(rows, tokens)](
        x_TI, residual, x_TI if norm_weight_I is None else norm_weight_I, factors.down_AKI, factors.rank_A,
        step.adapter_T, h_TH, x_TI.stride(0), residual.stride(0), eps, inputs=inputs, MOST=most, PARTS=rows // most,
        BLOCK=block, DEPTH=DEPTH, NORM=norm_weight_I is not None, RESIDUAL=residual_TI is not None,
        num_warps=max(1, min(8, block // 512)), **launch_options(x_TI.device),
    )  # fmt: skip
    end_0, end_1, end_2 = ends(factors)
    return {
        "h_ptr": h_TH, "up_ptr": factors.up_AOR, "adapter_ptr": step.adapter_T, "up_adapter": factors.up_AOR.stride(0),
        "up_output": factors.up_AOR.stride(1), "end_0": end_0, "end_1": end_1, "end_2": end_2, "MOST": most,
        "Q": power_of_two(most), "PARTS": rows // most,
    }  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "tiles", "together", "turn"])
def thin_panels_kernel(
    x_ptr, down_ptr, rank_ptr, adapter_ptr, start_ptr, panel_ptr, h_ptr, sums_ptr, arrival_ptr, ready_ptr, x_stride,
    tokens, tiles, together, turn, inputs: tl.constexpr, ADAPTERS: tl.constexpr, MOST: tl.constexpr,
    PARTS: tl.constexpr, PANELS: tl.constexpr, SHARES: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PANEL: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store h [T, H], 0 where a column is not of the token's adapter or behind its rank. Of panels without an adapter
    of the step it stores nothing. WIDE: multiply in float32.

    sums: float32 [places, SHARES, M · C], with a place for each tile, part and panel. arrival: a counter of each
        place, 0 between launches.
    ready: gets this launch's turn once x is there.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    share, tile = program % SHARES, program // SHARES % tiles
    part, begin_at = program // SHARES // tiles % PARTS, program // SHARES // tiles // PARTS
    token_M = tile * M + tl.arange(0, M)
    real_M = token_M < tokens
    own_M = tl.load(adapter_ptr + token_M, mask=real_M, other=0)
    EACH: tl.constexpr = (inputs + SHARES * BLOCK - 1) // (SHARES * BLOCK) * BLOCK
    input_B = share * EACH + tl.arange(0, BLOCK)
    x_ptr_MB = x_ptr + token_M[:, None] * x_stride + input_B[None, :]
    count = tl.load(panel_ptr)
    # Programs without a panel leave their places to the linear map's at once. The first ones always wait
    for nth in range(begin_at, tl.maximum(count, 1), together):
        panel = tl.load(panel_ptr + 1 + nth) * tl.minimum(count, 1)  # where no token has an adapter, panel 0 gets zeros
        column_C = panel * PANEL + tl.arange(0, PANEL)
        adapter_C, rank_C = column_C // MOST, column_C % MOST
        inside_C = adapter_C < ADAPTERS * tl.minimum(count, 1)
        first_C = tl.load(start_ptr + adapter_C, mask=inside_C, other=0)
        inside_C &= tl.load(start_ptr + adapter_C + 1, mask=inside_C, other=0) > first_C
        inside_C &= rank_C < tl.load(rank_ptr + adapter_C, mask=inside_C, other=0)
        row_C = (adapter_C.to(tl.int64) * PARTS + part) * MOST + rank_C
        own_MC = (own_M[:, None] - 1 == adapter_C[None, :]) & inside_C[None, :]
        down_ptr_BC = down_ptr + row_C[None, :] * inputs + input_B[:, None]
        if PDL:
            tl.extra.cuda.gdc_wait()
            if program == 0:
                tl.atomic_xchg(ready_ptr, turn, sem="release")

        acc_MC = tl.zeros((M, PANEL), tl.float32)
        for at in tl.range(0, EACH, BLOCK, num_stages=STAGES):
            real_B = input_B + at < inputs
            x_MB = tl.load(x_ptr_MB + at, mask=real_M[:, None] & real_B[None, :], other=0)
            w_BC = tl.load(down_ptr_BC + at, mask=inside_C[None, :] & real_B[:, None], other=0)
            if WIDE:
                x_MB, w_BC = x_MB.to(tl.float32), w_BC.to(tl.float32)
            acc_MC = tl.dot(x_MB, w_BC, acc_MC, input_precision="ieee")

        mine = True
        if SHARES > 1:
            place = (tile * PARTS + part) * PANELS + nth
            size: tl.constexpr = M * PANEL
            at_MC = tl.arange(0, M)[:, None] * PANEL + tl.arange(0, PANEL)[None, :]
            place_ptr = sums_ptr + place.to(tl.int64) * (SHARES * size)
            tl.store(place_ptr + share * size + at_MC, acc_MC, mask=own_MC)
            tl.debug_barrier()  # until every thread's sums are written, before any thread of this program says so
            mine = tl.atomic_add(arrival_ptr + place, 1) == SHARES - 1
            if mine:
                tl.store(arrival_ptr + place, 0)
                acc_MC = tl.zeros((M, PANEL), tl.float32)
                for some in range(0, SHARES, AT_ONCE):
                    for other in tl.static_range(AT_ONCE):  # on their way together
                        at_ptr_MC = place_ptr + (some + other) * size + at_MC
                        acc_MC += tl.load(at_ptr_MC, mask=own_MC, other=0, cache_modifier=".cg")
        if mine:
            h_MC = tl.where(own_MC, acc_MC, 0).to(h_ptr.dtype.element_ty)
            at_C = (part * PANELS + panel) * PANEL + tl.arange(0, PANEL)
            h_ptr_MC = h_ptr + token_M.to(tl.int64)[:, None] * (PARTS * PANELS * PANEL) + at_C[None, :]
            tl.store(h_ptr_MC, h_MC, mask=real_M[:, None])


def shared(inputs: int, most: int) -> tuple[int, int]:
    """Return the number of programs that share so many inputs, no more than `most`, and of their sums that are loaded
    together."""
    blocks, most = triton.cdiv(inputs, BLOCK), min(MOST_SHARES, max(1, most))
    each = max(SHARE // BLOCK, triton.cdiv(blocks, power_of_two(most + 1) // 2))
    shares = triton.cdiv(blocks, each)
    return shares, max(count for count in range(1, MOST_AT_ONCE + 1) if shares % count == 0)


class Thin(NamedTuple):
    """x multiplied by the first matrices of the tokens' adapters.

    h_TH: columns of every part and panel. Panels without an adapter of the step hold anything.
    sums: what the programs that make it share. Its memory must not be used again before the linear map's programs have
        waited for them.
    """

    h_TH: Tensor
    sums: Tensor


def for_panels(x_TI: Tensor, adapters: StepFactors, room: int, turn: int) -> Thin:
    """Launch `thin_panels_kernel` in front of a linear map. room: how many programs may run beside the first ones of
    the linear map. turn: of this launch among the step's."""
    factors, step = adapters
    assert step.panel_P1 is not None
    (tokens, inputs), (held, _, most) = x_TI.shape, factors.up_AOR.shape
    parts, panels = factors.down_AKI.shape[1] // most, num_panels(held, most)
    each = max(16, min(64, power_of_two(tokens)))
    tiles = triton.cdiv(tokens, each)
    places, unit = tiles * parts * panels, tiles * parts
    most_shares = MOST_SUMS // (places * each * PANEL * 4) if places <= MOST_PLACES else 1
    wanted = min(room // unit, PROGRAMS // (unit * panels))
    blocks = triton.cdiv(inputs, BLOCK)
    if blocks > MOST_BLOCKS * max(1, wanted):  # or it would end behind the linear map
        wanted = triton.cdiv(blocks, FEW_BLOCKS)
    shares, at_once = shared(inputs, min(most_shares, wanted))
    together = min(panels, max(1, PROGRAMS // (unit * shares)))
    h_TH = torch.empty(tokens, parts * panels * PANEL, dtype=x_TI.dtype, device=x_TI.device)
    sums, arrivals = x_TI, x_TI
    if shares > 1:
        sums = torch.empty(places * shares * each * PANEL, dtype=torch.float32, device=x_TI.device)
        # The linear map's programs, which may run at the same time, have the first half
        arrivals = counters(x_TI.device, MOST_PLACES + places)[MOST_PLACES:]
    thin_panels_kernel[(unit * together * shares,)](
        x_TI, factors.down_AKI, factors.rank_A, step.adapter_T, step.start_A1, step.panel_P1, h_TH, sums, arrivals,
        step.ready_1, x_TI.stride(0), tokens, tiles, together, turn, inputs=inputs, ADAPTERS=held, MOST=most,
        PARTS=parts, PANELS=panels, SHARES=shares, M=each, BLOCK=BLOCK, STAGES=STAGES, PANEL=PANEL, AT_ONCE=at_once,
        WIDE=INTERPRETED and x_TI.dtype == torch.bfloat16, num_warps=8, **launch_options(x_TI.device),
    )  # fmt: skip
    return Thin(h_TH, sums)


def _aot_rows(inputs: int, block: int, parts: int, *, norm: bool) -> AotKernel:
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "down_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | {"rank_ptr": "*i32", "adapter_ptr": "*i32", "h_ptr": "*bf16"}
    signature |= {"token_stride": "i32", "residual_stride": "i32:16", "eps": "fp32"}
    cut = {"inputs": inputs, "MOST": 16, "PARTS": parts, "BLOCK": block, "DEPTH": DEPTH, "NORM": norm, "RESIDUAL": norm}
    return AotKernel(thin_rows_kernel, signature, cut, num_warps=8, hot=True, archs=("sm_90",))


def _aot_panels(inputs: int, parts: int, each: int) -> AotKernel:
    signature = {"x_ptr": "*bf16", "down_ptr": "*bf16"}
    signature |= dict.fromkeys(("rank_ptr", "adapter_ptr", "start_ptr", "panel_ptr"), "*i32")
    signature |= {"h_ptr": "*bf16", "sums_ptr": "*fp32", "arrival_ptr": "*i32", "ready_ptr": "*i32"}
    signature |= {"x_stride": "i32:16"} | dict.fromkeys(("tokens", "tiles", "together", "turn"), "i32")
    shares, at_once = shared(inputs, 8)
    cut = {"inputs": inputs, "ADAPTERS": 64, "MOST": 16, "PARTS": parts, "PANELS": 16, "SHARES": shares, "M": each}
    cut |= {"BLOCK": BLOCK, "STAGES": STAGES, "PANEL": PANEL, "WIDE": False, "AT_ONCE": at_once}
    return AotKernel(thin_panels_kernel, signature, cut, num_warps=8, hot=True, archs=("sm_90",))


AOT = (_aot_rows(4096, 4096, 3, norm=True), _aot_panels(14_336, 1, 64))
