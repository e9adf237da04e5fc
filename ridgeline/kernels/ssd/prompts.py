"""The launches for rows of several tokens; triton_chunks.py says what they compute.

Legend: that of triton_chunks.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.kernels.launch import compute_capability, launch_options
from ridgeline.kernels.ssd import triton_chunks, triton_products
from ridgeline.kernels.ssd.choose import Cut
from ridgeline.kernels.turns import Chunks, Turns

SCALES = 3


@dataclass(frozen=True)
class Given:
    """The op's arguments, and what all launches are made from.

    y_THP: the outputs to write. log, shift, weight: of all chunks, see `_decays`.
    before_LHPS, sums_LHPS: the states before and behind segments, see `_pass`.
    """

    x_THP: Tensor
    b_TGS: Tensor
    c_TGS: Tensor
    skip_H: Tensor
    states_NHPS: Tensor
    turns: Turns
    y_THP: Tensor
    cut: Cut
    chunks: Chunks
    segments: Chunks
    log: Tensor
    shift: Tensor
    weight: Tensor
    before_LHPS: Tensor
    sums_LHPS: Tensor

    @property
    def share(self) -> int:
        """Return how many heads a group has."""
        return self.x_THP.shape[1] // self.b_TGS.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        return launch_options(self.x_THP.device)

    @property
    def shape(self) -> dict[str, Any]:
        (_, heads, width), size = self.x_THP.shape, self.b_TGS.shape[2]
        strides = {"X_TOKEN": self.x_THP.stride(0), "BC_TOKEN": self.b_TGS.stride(0)}
        return triton_chunks.shape_constants(heads, width, size, self.x_THP.dtype, self.cut) | strides

    @property
    def parts(self) -> int:
        """Return how many programs share a head's state."""
        return triton.cdiv(self.x_THP.shape[2], self.shape["BLOCK_P"])

    @property
    def of_segments(self) -> tuple[Tensor, ...]:
        cuts = self.segments
        return cuts.first_C, cuts.length_C, cuts.row_C, self.turns.start_R1, self.chunks.of_R1

    @property
    def fresh_R(self) -> Tensor:
        return self.turns.fresh_R.view(torch.uint8)


def scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    rate_H: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    skip_H: Tensor,
    dt_bias_H: Tensor,
    dt_min: float,
    dt_max: float,
    states_NHPS: Tensor,
    turns: Turns,
    y_THP: Tensor,
    cut: Cut,
) -> None:
    """Write the outputs of all rows of more than one token to `y_THP`, and replace their states."""
    tokens, heads, width = x_THP.shape
    device, size = x_THP.device, b_TGS.shape[2]
    if b_TGS.stride(0) != c_TGS.stride(0):
        b_TGS, c_TGS = b_TGS.contiguous(), c_TGS.contiguous()
    cut = settled(cut, x_THP, b_TGS)
    chunks, segments = turns.chunks(cut.chunk, at_marks=False), turns.chunks(cut.segment, at_marks=False)
    # One chunk more than there is, since the scan asks for the next chunk's decay
    scales = torch.empty((SCALES, len(chunks.first_C) + 1, heads, cut.chunk), dtype=torch.float32, device=device)
    states = torch.empty((2, tokens // cut.segment, heads, width, size), dtype=torch.float32, device=device)
    given = Given(
        x_THP, b_TGS, c_TGS, skip_H, states_NHPS, turns, y_THP, cut, chunks, segments, *scales, *states
    )  # fmt: skip
    triton_chunks._decays[(len(chunks.first_C), triton.cdiv(heads, triton_chunks.HEADS_AT_ONCE))](
        dt_TH, rate_H, dt_bias_H, *scales, chunks.first_C, chunks.length_C, chunks.row_C, turns.start_R1,
        dt_TH.stride(0), dt_min, dt_max,
        H=heads, Q=cut.chunk, BLOCK_H=triton_chunks.HEADS_AT_ONCE, LOG2_E=triton_chunks.LOG2_E,
        FORGOTTEN=triton_chunks.FORGOTTEN, num_warps=4, **given.options,
    )  # fmt: skip
    if len(given.sums_LHPS):
        _segments(given)
    triton_chunks._marks[(heads * given.parts, turns.num_rows)](
        x_THP, b_TGS, given.log, given.shift, given.before_LHPS, given.sums_LHPS, states_NHPS, turns.start_R1,
        chunks.of_R1, turns.reads_R, given.fresh_R, turns.marks_R, turns.marked_R, states_NHPS.stride(0), given.share,
        **given.shape, num_warps=cut.warps, **given.options,
    )  # fmt: skip
    _outputs(given)


def settled(cut: Cut, x_THP: Tensor, b_TGS: Tensor) -> Cut:
    """Return the cut, or what takes its place where its kernel cannot run."""
    if cut.outputs != "hopper":
        return cut
    from ridgeline.kernels.ssd import hopper_outputs

    (_, heads, width), (groups, size) = x_THP.shape, b_TGS.shape[1:]
    fits = hopper_outputs.fits(heads, groups, width, size, x_THP.itemsize)
    strides = (x_THP.stride(0), b_TGS.stride(0))
    wide = all(x.data_ptr() % 16 == 0 for x in (x_THP, b_TGS)) and all(x % 8 == 0 for x in strides)
    if not (fits and wide and compute_capability(x_THP.device) == (9, 0)):
        return replace(cut, outputs="shared")
    return replace(cut, chunk=hopper_outputs.CHUNK)


def _segments(given: Given) -> None:
    """Compute the states between segments."""
    _, heads, width, size = given.states_NHPS.shape
    turns, states = given.turns, given.states_NHPS
    left_LH = torch.empty((len(given.sums_LHPS), heads), dtype=torch.float32, device=states.device)
    triton_chunks._segments[(heads * given.parts, len(given.segments.first_C))](
        given.x_THP, given.b_TGS, given.log, given.shift, given.sums_LHPS, left_LH, *given.of_segments,
        given.share, **given.shape, num_warps=given.cut.warps, **given.options,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(width * size))
    triton_chunks._pass[(heads * triton.cdiv(width * size, block), turns.num_rows)](
        given.sums_LHPS, given.before_LHPS, left_LH, states, turns.start_R1, turns.reads_R, given.fresh_R,
        states.stride(0),
        H=heads, SIZE=width * size, SEGMENT=given.cut.segment, BLOCK=block, num_warps=4, **given.options,
    )  # fmt: skip


def _outputs(given: Given) -> None:
    cut, turns, chunks, heads = given.cut, given.turns, given.chunks, given.x_THP.shape[1]
    groups, many = given.b_TGS.shape[1], len(given.segments.first_C)
    bc, shape = (given.b_TGS, given.c_TGS), given.shape
    products_CGQQ = given.b_TGS.new_empty((len(chunks.first_C), groups, cut.chunk, cut.chunk))
    names = ("BC_TOKEN", "S", "BLOCK_S", "Q", "DOT")
    triton_products._products[(len(chunks.first_C), groups)](
        *bc, products_CGQQ, chunks.first_C, chunks.length_C, chunks.row_C, turns.start_R1,
        G=groups, **{name: shape[name] for name in names}, num_warps=4, **given.options,
    )  # fmt: skip
    of_outputs = (
        given.x_THP, *bc, given.skip_H, given.log, given.shift, given.weight, products_CGQQ, given.before_LHPS,
        given.sums_LHPS, given.y_THP, given.states_NHPS, *given.of_segments,
        turns.reads_R, turns.writes_R, given.fresh_R, given.states_NHPS.stride(0), given.share,
    )  # fmt: skip
    if cut.outputs == "shared":
        triton_products._outputs[(heads * given.parts, many)](
            *of_outputs, G=groups, FINITE=triton_products.FINITE, **shape, num_warps=cut.warps, **given.options,
        )  # fmt: skip
        return
    from ridgeline.kernels.ssd import hopper_outputs

    names_of_hopper = ("X_TOKEN", "BC_TOKEN", "H", "P", "S", "Q", "SEGMENT")
    hopper_outputs.ssd_hopper_outputs[(heads // 2, many)](
        *of_outputs, G=groups, **{name: shape[name] for name in names_of_hopper}, STAGES=hopper_outputs.STAGES,
        num_warps=4, **given.options,
    )  # fmt: skip
