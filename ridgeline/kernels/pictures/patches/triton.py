"""Patches on a GPU: two launches for all views, one along each axis; more where a picture is resized more than once.

A program has a tile of one job: some lines, and some numbers of each, which are pixels times colors. Sums are integers
of 32 bits, so every order gives the same bits. The second launch also looks the numbers up and writes them where the
tower reads them. The legend is that of op.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.pictures.patches.plan import PassJob, plan
from ridgeline.kernels.pictures.patches.tables import BITS, HALF, OUTSIDE, numbers
from ridgeline.kernels.pictures.views import Patching, View

FIELDS = tl.constexpr(len(PassJob._fields))
HIGH, WIDE = 8, 128  # lines and numbers of a program
_BITS, _HALF, _OUTSIDE = tl.constexpr(BITS), tl.constexpr(HALF), tl.constexpr(OUTSIDE)


@triton.jit
def _resized(source_ptr, tables_ptr, job_ptr, line, column, color, inside, VERTICAL: tl.constexpr):
    """Return pixels of the pass: [HIGH, WIDE] int32."""
    start = tl.load(job_ptr)
    rows, columns = tl.load(job_ptr + 1).to(tl.int32), tl.load(job_ptr + 2).to(tl.int32)
    down, right = tl.load(job_ptr + 3).to(tl.int32), tl.load(job_ptr + 4).to(tl.int32)
    first_ptr = tables_ptr + tl.load(job_ptr + 8)
    weights_ptr = tables_ptr + tl.load(job_ptr + 9)
    taps = tl.load(job_ptr + 10).to(tl.int32)
    fill = (tl.load(job_ptr + 11).to(tl.int32) >> (8 * color)) & 255
    total = tl.zeros(inside.shape, tl.int32) + _HALF
    place = line if VERTICAL else column
    first = tl.load(first_ptr + place, mask=inside, other=0)
    for tap in range(taps):
        weight = tl.load(weights_ptr + place * taps + tap, mask=inside, other=0)
        y = (first + tap if VERTICAL else line) + down
        x = (column if VERTICAL else first + tap) + right
        held = inside & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        at = start + (y.to(tl.int64) * columns + x) * 3 + color
        pixel = tl.load(source_ptr + at, mask=held, other=0).to(tl.int32)
        total += weight * tl.where(held, pixel, fill)
    return tl.minimum(tl.maximum(total >> _BITS, 0), 255)


@triton.jit
def _pass(
    source_ptr, tables_ptr, jobs_ptr, out_ptr, VERTICAL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Write a tile of a pass to the scratch buffer."""
    job_ptr = jobs_ptr + tl.program_id(1).to(tl.int64) * FIELDS
    rows, columns = tl.load(job_ptr + 6).to(tl.int32), tl.load(job_ptr + 7).to(tl.int32)
    across = tl.cdiv(columns * 3, WIDE)
    tile = tl.program_id(0)
    if tile >= across * tl.cdiv(rows, HIGH):
        return
    line = (tile // across) * HIGH + tl.arange(0, HIGH)[:, None]
    number = (tile % across) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (line < rows) & (number < columns * 3)
    found = _resized(source_ptr, tables_ptr, job_ptr, line, number // 3, number % 3, inside, VERTICAL)
    at = tl.load(job_ptr + 5) + line.to(tl.int64) * columns * 3 + number
    tl.store(out_ptr + at, found.to(tl.uint8), mask=inside)


@triton.jit
def _rows(
    source_ptr, tables_ptr, jobs_ptr, numbers_ptr, out_ptr, VERTICAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FRAMES: tl.constexpr, MERGE: tl.constexpr, LAST: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of a last pass as numbers of rows. LAST: colors come last in a row."""
    job_ptr = jobs_ptr + tl.program_id(1).to(tl.int64) * FIELDS
    rows, columns = tl.load(job_ptr + 6).to(tl.int32), tl.load(job_ptr + 7).to(tl.int32)
    across = tl.cdiv(columns * 3, WIDE)
    tile = tl.program_id(0)
    if tile >= across * tl.cdiv(rows, HIGH):
        return
    y = (tile // across) * HIGH + tl.arange(0, HIGH)[:, None]
    number = (tile % across) * WIDE + tl.arange(0, WIDE)[None, :]
    x, color = number // 3, number % 3
    inside = (y < rows) & (number < columns * 3)
    line, column = y - tl.load(job_ptr + 12).to(tl.int32), x - tl.load(job_ptr + 13).to(tl.int32)
    made = (line >= 0) & (line < tl.load(job_ptr + 14)) & (column >= 0) & (column < tl.load(job_ptr + 15))
    found = _resized(source_ptr, tables_ptr, job_ptr, line, column, color, inside & made, VERTICAL)
    fill = (tl.load(job_ptr + 11).to(tl.int32) >> (8 * color)) & 255
    fill = tl.where(tl.load(job_ptr + 17) == 1, _OUTSIDE, fill)
    found = tl.where(made, found, fill)
    value = tl.load(numbers_ptr + found * 3 + color, mask=inside, other=0)
    down, right, wide = y // ROWS, x // COLUMNS, columns // COLUMNS
    if MERGE == 1:
        patch = down * wide + right
    else:
        square = (down // MERGE) * (wide // MERGE) + right // MERGE
        patch = (square * MERGE + down % MERGE) * MERGE + right % MERGE
    row_ptr = out_ptr + (tl.load(job_ptr + 5) + patch) * (3 * FRAMES * ROWS * COLUMNS)
    slot = tl.load(job_ptr + 16)
    for frame in tl.static_range(FRAMES):
        if LAST:
            at = ((frame * ROWS + y % ROWS) * COLUMNS + x % COLUMNS) * 3 + color
        else:
            at = ((color * FRAMES + frame) * ROWS + y % ROWS) * COLUMNS + x % COLUMNS
        if (slot == -1) | (slot == frame):
            tl.store(row_ptr + at, value, mask=inside)


def patches(
    pixels_O: Tensor, sizes: Sequence[tuple[int, int]], views: Sequence[View], patching: Patching, dtype: torch.dtype
) -> Tensor:
    """Compute `op.patches`."""
    device = pixels_O.device
    wanted = plan(tuple(sizes), tuple(views), patching)
    out_NP = torch.empty(wanted.rows, patching.width, dtype=dtype, device=device)
    scratch_O = torch.empty(max(1, wanted.scratch), dtype=torch.uint8, device=device)
    jobs = _upload(np.concatenate([each.jobs for each in wanted.launches]), device)
    tables = _upload(wanted.tables, device)
    start = 0
    for launch in wanted.launches:
        grid = launch.tiles(HIGH, WIDE), len(launch.jobs)
        own, start = jobs[start : start + len(launch.jobs)], start + len(launch.jobs)
        source_O = pixels_O if launch.raw else scratch_O
        if not launch.last:
            _pass[grid](source_O, tables, own, scratch_O, VERTICAL=launch.vertical, HIGH=HIGH, WIDE=WIDE, num_warps=4)
            continue
        _rows[grid](
            source_O, tables, own, _numbers(patching, dtype, device), out_NP, VERTICAL=launch.vertical,
            ROWS=patching.rows, COLUMNS=patching.columns, FRAMES=patching.frames, MERGE=patching.merge,
            LAST=patching.channels_last, HIGH=HIGH, WIDE=WIDE, num_warps=4,
        )  # fmt: skip
    return out_NP


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array on the device. The copy does not wait for the GPU."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@lru_cache(maxsize=64)
def _numbers(patching: Patching, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers of pixels on the device: [257, C]."""
    return torch.from_numpy(numbers(patching)).to(device, dtype)


_TYPES = {"source_ptr": "*u8", "tables_ptr": "*i32", "jobs_ptr": "*i64"}
_ROW_TYPES = {**_TYPES, "numbers_ptr": "*bf16", "out_ptr": "*bf16"}
_TILE = {"HIGH": HIGH, "WIDE": WIDE}
_ROW = {"ROWS": 14, "COLUMNS": 14, "FRAMES": 2, "MERGE": 2, "LAST": False, **_TILE}

AOT = (
    AotKernel(_pass, {**_TYPES, "out_ptr": "*u8"}, {"VERTICAL": False, **_TILE}, num_warps=4, hot=True),
    AotKernel(_rows, _ROW_TYPES, {"VERTICAL": True, **_ROW}, num_warps=4, hot=True),
    AotKernel(_pass, {**_TYPES, "out_ptr": "*u8"}, {"VERTICAL": True, **_TILE}, num_warps=4, archs=ONE_OF_EACH),
    AotKernel(_rows, _ROW_TYPES, {"VERTICAL": False, **_ROW}, num_warps=4, archs=ONE_OF_EACH),
)
