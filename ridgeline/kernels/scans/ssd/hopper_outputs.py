"""Outputs of Mamba-2's chunks for Hopper: two heads of a group share what a program reads, and products overlap.

As in triton_products.py, a program walks through a segment with states in registers. Here it is two heads', one for
each warpgroup, so chunks of b, c and their products come from the second-level cache once for both: 28 KiB for a chunk
of one head in place of 40. While one warpgroup weighs its products, the other one multiplies. Within a warpgroup the
product of c with the state runs beside the decays, and that of the chunk beside the state's. Other warps fill the ring
of chunks. All products of a chunk of one head take 640 cycles of a multiprocessor.

Heads have 64 numbers, and states 64 or 128 of each.

Legend: that of triton_chunks.py
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, load_rows
from ridgeline.kernels.scans.ssd.triton_chunks import aot_types
from ridgeline.kernels.scans.ssd.triton_products import FINITE

STAGES = 3  # chunks in shared memory, 56 KiB each if states have 128 numbers
WIDTH, CHUNK = 64, 64
_WARPS = gl.constexpr(4)  # of each head, and as many that fill the ring
_FINITE = gl.constexpr(FINITE)


@gluon.jit
def _copy(to, pointer, stride: gl.constexpr, rows, I: gl.constexpr, J: gl.constexpr):  # noqa: E741
    """Ask for an I x J tile. Rows from `rows` on become zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // J, J // 8], [_WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, I, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, J, gl.SliceLayout(0, layout)), 0)
    load_rows(to, pointer + (i * stride + j), mask=(i < rows) & (j >= 0))


@gluon.jit
def _fill(
    length, tiles, full, empty, sources, of_chunk,
    X_TOKEN: gl.constexpr, BC_TOKEN: gl.constexpr, G: gl.constexpr, H: gl.constexpr, P: gl.constexpr, S: gl.constexpr,
    Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with chunks. A chunk is announced when the next one has been asked for."""
    b, c, x, products, factors, _ = tiles
    b_ptr, c_ptr, x_ptr, products_ptr, log_ptr, shift_ptr, weight_ptr = sources
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    number = gl.arange(0, 2 * Q, line)  # both heads' factors lie one behind the other
    step = length * 0
    for ahead in range(0, length, Q):
        here = step % STAGES
        mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
        rows = length - ahead
        at = step.to(gl.int64)
        _copy(c.index(here), c_ptr + at * (Q * BC_TOKEN), BC_TOKEN, rows, Q, S)
        _copy(products.index(here), products_ptr + at * (G * Q * Q), Q, Q, Q, Q)
        _copy(x.index(here * 2), x_ptr + at * (Q * X_TOKEN), X_TOKEN, rows, Q, P)
        _copy(x.index(here * 2 + 1), x_ptr + (at * (Q * X_TOKEN) + P), X_TOKEN, rows, Q, P)
        _copy(b.index(here), b_ptr + at * (Q * BC_TOKEN), BC_TOKEN, rows, Q, S)
        scale = of_chunk + at * (H * Q) + number
        load_rows(factors.index(here * 3), log_ptr + scale, mask=number >= 0)
        load_rows(factors.index(here * 3 + 1), shift_ptr + scale, mask=number >= 0)
        load_rows(factors.index(here * 3 + 2), weight_ptr + scale, mask=number >= 0)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()  # every warp's copies are there
        mbarrier.arrive(full.index((step + STAGES - 1) % STAGES), count=1, pred=step >= 1)
        step += 1
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index((step + STAGES - 1) % STAGES), count=1, pred=step >= 1)


@gluon.jit
def _before(
    before_ptr, sums_ptr, states_ptr, reads_ptr, fresh_ptr, block_size, segment, cells,
    HPS: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """Return a head's state before a segment, whose cells are so many numbers behind the first head's."""
    first, length, row, begin, end = segment
    if end - begin <= SEGMENT:
        exists = (cells >= 0) & (length > 0) & (gl.load(fresh_ptr + row) == 0)  # a fresh row's state is not read
        return gl.load(states_ptr + gl.load(reads_ptr + row) * block_size + cells, mask=exists, other=0.0)
    else:
        exists = (cells >= 0) & (length > 0)
        slot = begin // SEGMENT
        source = before_ptr
        if first != begin:
            source = sums_ptr
            slot = first // SEGMENT - 1
        return gl.load(source + slot.to(gl.int64) * HPS + cells, mask=exists, other=0.0)


@gluon.jit
def _multiply(
    which: gl.constexpr, head, segment, tiles, full, empty, skip_ptr, before_ptr, sums_ptr, y_ptr, states_ptr,
    reads_ptr, writes_ptr, fresh_ptr, block_size,
    H: gl.constexpr, P: gl.constexpr, S: gl.constexpr, Q: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the chunks of one head, and write its outputs and its state."""
    b_tiles, c_tiles, x_tiles, products_tiles, factors, state_tiles = tiles
    first, length, row, _, end = segment
    dtype: gl.constexpr = b_tiles.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, S, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, Q, 16])
    of_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    of_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    later: gl.constexpr = gl.SliceLayout(1, narrow)  # tokens of c
    earlier: gl.constexpr = gl.SliceLayout(0, narrow)  # tokens of b
    added: gl.constexpr = gl.SliceLayout(0, of_wide)
    out: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // P, P // 8], [_WARPS, 1], [1, 0])
    p = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(1, wide)), 1)
    s = gl.expand_dims(gl.arange(0, S, gl.SliceLayout(0, wide)), 0)
    cells = head * (P * S) + p * S + s
    i = gl.expand_dims(gl.arange(0, Q, gl.SliceLayout(1, out)), 1)
    j = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, out)), 0)
    y_offset = i * (H * P) + j
    nothing = gl.zeros([Q, P], gl.float32, narrow)
    skip = gl.load(skip_ptr + head).to(gl.float32)
    state = _before(
        before_ptr, sums_ptr, states_ptr, reads_ptr, fresh_ptr, block_size, segment, cells, H * P * S, SEGMENT
    )  # fmt: skip
    state_tile = state_tiles.index(which)
    state_tile.store(state.to(dtype))
    fence_async_shared()
    barrier()
    y_ptr += first.to(gl.int64) * (H * P) + head * P
    step = length * 0
    for ahead in range(0, length, Q):
        here = step % STAGES
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        b, c, x = b_tiles.index(here), c_tiles.index(here), x_tiles.index(here * 2 + which)
        y = warpgroup_mma(c, state_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        log_line = factors.index(here * 3).slice(which * Q, Q, 0)
        log = gl.expand_dims(log_line.load(later), 1)
        shift = gl.expand_dims(factors.index(here * 3 + 1).slice(which * Q, Q, 0).load(earlier), 0)
        left = gl.exp2(gl.minimum(log - shift, _FINITE))
        products = products_tiles.index(here).load(narrow).to(gl.float32)
        mixed = gl.convert_layout((products * left).to(dtype), of_narrow)
        y = warpgroup_mma_wait(0, deps=(y,))
        y = warpgroup_mma(mixed, x, y * gl.exp2(log), is_async=True)
        weight = gl.expand_dims(factors.index(here * 3 + 2).slice(which * Q, Q, 0).load(added), 0)
        weighted = (x.permute((1, 0)).load(of_wide).to(gl.float32) * weight).to(dtype)
        total = gl.exp2(log_line.slice(Q - 1, 1, 0).load(gl.SliceLayout(0, wide)))
        state = warpgroup_mma(weighted, b, state * gl.expand_dims(total, 0), is_async=True)
        plain = x.load(narrow).to(gl.float32) * skip
        y = warpgroup_mma_wait(1, deps=(y,))
        y = gl.convert_layout((y + plain).to(dtype), out)
        gl.store(y_ptr + y_offset, y, mask=(i < length - ahead) & (j >= 0))
        y_ptr += Q * H * P
        state = warpgroup_mma_wait(0, deps=(state,))
        barrier()  # no warp reads the state in front any more
        state_tile.store(state.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(here), count=1)
        step += 1
    if (length > 0) & (first + length == end):
        gl.store(states_ptr + gl.load(writes_ptr + row) * block_size + cells, state)


@gluon.jit
def ssd_hopper_outputs(
    x_ptr, b_ptr, c_ptr, skip_ptr, log_ptr, shift_ptr, weight_ptr, products_ptr, before_ptr, sums_ptr, y_ptr,
    states_ptr, first_ptr, length_ptr, row_ptr, start_ptr, chunk_ptr, reads_ptr, writes_ptr, fresh_ptr,
    block_size, share,
    X_TOKEN: gl.constexpr, BC_TOKEN: gl.constexpr, G: gl.constexpr, H: gl.constexpr, P: gl.constexpr, S: gl.constexpr,
    Q: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Walk through segment `program_id(1)` with the states of two heads of one group."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = gl.program_id(1)
    head = gl.program_id(0) * 2
    length = gl.load(length_ptr + at)
    row = gl.where(length > 0, gl.load(row_ptr + at), 0)
    begin, end = gl.load(start_ptr + row), gl.load(start_ptr + row + 1)
    first = gl.load(first_ptr + at)
    length = gl.where(end - begin == 1, 0, length)  # another kernel runs rows of one token
    segment = (first, length, row, begin, end)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, S], shared)
    c_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, S], shared)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, Q, P], shared)
    products = gl.allocate_shared_memory(dtype, [STAGES, Q, Q], shared)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 2 * Q], line)
    states = gl.allocate_shared_memory(dtype, [2, P, S], shared)
    tiles = (b_tiles, c_tiles, x_tiles, products, factors, states)
    full, empty = barriers(STAGES), barriers(STAGES, 2)
    fence_async_shared()
    token = first.to(gl.int64)
    group = head // share
    chunk = (gl.load(chunk_ptr + row) + (first - begin) // Q).to(gl.int64)
    sources = (
        b_ptr + (token * BC_TOKEN + group * S), c_ptr + (token * BC_TOKEN + group * S),
        x_ptr + (token * X_TOKEN + head * P), products_ptr + (chunk * G + group) * (Q * Q),
        log_ptr, shift_ptr, weight_ptr,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                0, head, segment, tiles, full, empty, skip_ptr, before_ptr, sums_ptr, y_ptr, states_ptr,
                reads_ptr, writes_ptr, fresh_ptr, block_size, H, P, S, Q, SEGMENT, STAGES,
            )),
            (_multiply, (
                1, head + 1, segment, tiles, full, empty, skip_ptr, before_ptr, sums_ptr, y_ptr, states_ptr,
                reads_ptr, writes_ptr, fresh_ptr, block_size, H, P, S, Q, SEGMENT, STAGES,
            )),
            (_fill, (
                length, tiles, full, empty, sources, (chunk * H + head) * Q,
                X_TOKEN, BC_TOKEN, G, H, P, S, Q, STAGES,
            )),
        ],
        [_WARPS, _WARPS],
        [208, 88],  # registers; the first partition has the rest, 208
    )  # fmt: skip


def fits(heads: int, groups: int, width: int, size: int, itemsize: int) -> bool:
    """Return True if the kernel can run heads of this shape: it is made for 16 bits."""
    return width == WIDTH and size in (64, 128) and heads // groups % 2 == 0 and itemsize == 2


def _aot() -> AotKernel:
    """Return an entry for Mamba-2's usual shape: 128 heads of 64 numbers, 128 of each in the state. The second head's
    partition keeps some of its addresses on the stack, and reads them once a chunk."""
    constants = {"X_TOKEN": 8448, "BC_TOKEN": 8448, "G": 1, "H": 128, "P": WIDTH, "S": 128, "Q": CHUNK}
    constants |= {"SEGMENT": 2048, "STAGES": STAGES}
    types = aot_types(ssd_hopper_outputs) | {"products_ptr": "*bf16"}
    names = [name for name in ssd_hopper_outputs.arg_names if name not in (*constants, "PDL")]
    return AotKernel(
        ssd_hopper_outputs, {name: types[name] for name in names}, constants,
        num_warps=4, tensor_cores="HGMMA", archs=("sm_90",),
    )  # fmt: skip


AOT = (_aot(),)
