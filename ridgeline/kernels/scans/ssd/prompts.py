"""The launches for rows of several tokens; triton_chunks.py says what they compute.

Legend: that of triton_chunks.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability, launch_options
from ridgeline.kernels.scans.metadata import Chunks, ScanMetadata
from ridgeline.kernels.scans.ssd import triton_chunks, triton_products
from ridgeline.kernels.scans.ssd.choose import Cut
from ridgeline.kernels.scans.ssd.op import SsdInputs

SCALES = 3


@dataclass(frozen=True)
class Work:
    """The tensors and cuts that all launches share.

    y_THP: the outputs to write. log, shift, weight: of all chunks, see `_decays`.
    before_LHPS, sums_LHPS: the states before and behind segments, see `_pass`.
    """

    given: SsdInputs
    states_NHPS: Tensor
    metadata: ScanMetadata
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
    def options(self) -> dict[str, Any]:
        return launch_options(self.y_THP.device)

    @property
    def shape(self) -> dict[str, Any]:
        (_, heads, width), size = self.given.x_THP.shape, self.given.b_TGS.shape[2]
        strides = {"X_TOKEN": self.given.x_THP.stride(0), "BC_TOKEN": self.given.b_TGS.stride(0)}
        return triton_chunks.shape_constants(heads, width, size, self.given.x_THP.dtype, self.cut) | strides

    @property
    def parts(self) -> int:
        """Return the number of programs that share a head's state."""
        return triton.cdiv(self.y_THP.shape[2], self.shape["BLOCK_P"])

    @property
    def of_segments(self) -> tuple[Tensor, ...]:
        return *self.segments.of_chunks, self.metadata.start_R1, self.chunks.of_R1


def scan(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata, y_THP: Tensor, cut: Cut) -> None:
    """Write the outputs of all rows of more than one token to `y_THP`, and replace their states."""
    (tokens, heads, width), size, device = y_THP.shape, given.b_TGS.shape[2], y_THP.device
    if given.b_TGS.stride(0) != given.c_TGS.stride(0):
        given = replace(given, b_TGS=given.b_TGS.contiguous(), c_TGS=given.c_TGS.contiguous())
    cut = settled(cut, given)
    chunks, segments = metadata.chunks(cut.chunk, at_marks=False), metadata.chunks(cut.segment, at_marks=False)
    # One chunk more than there is, since the scan asks for the next chunk's decay
    scales = torch.empty((SCALES, len(chunks.first_C) + 1, heads, cut.chunk), dtype=torch.float32, device=device)
    states = torch.empty((2, tokens // cut.segment, heads, width, size), dtype=torch.float32, device=device)
    work = Work(given, states_NHPS, metadata, y_THP, cut, chunks, segments, *scales, *states)
    triton_chunks._decays[(len(chunks.first_C), triton.cdiv(heads, triton_chunks.HEADS_AT_ONCE))](
        given.dt_TH, given.rate_H, given.dt_bias_H, *scales, *chunks.of_chunks, metadata.start_R1,
        given.dt_TH.stride(0), given.dt_min, given.dt_max,
        H=heads, Q=cut.chunk, BLOCK_H=triton_chunks.HEADS_AT_ONCE, LOG2_E=triton_chunks.LOG2_E,
        FORGOTTEN=triton_chunks.FORGOTTEN, num_warps=4, **work.options,
    )  # fmt: skip
    if len(work.sums_LHPS):
        _segments(work)
    start_R1, reads_R, _, fresh_R, marks_R, marked_R = metadata.of_rows
    triton_chunks._marks[(heads * work.parts, metadata.num_rows)](
        given.x_THP, given.b_TGS, work.log, work.shift, work.before_LHPS, work.sums_LHPS, states_NHPS, start_R1,
        chunks.of_R1, reads_R, fresh_R, marks_R, marked_R, states_NHPS.stride(0), given.share,
        **work.shape, num_warps=cut.warps, **work.options,
    )  # fmt: skip
    _outputs(work)


def settled(cut: Cut, given: SsdInputs) -> Cut:
    """Return the cut, or what takes its place where its kernel cannot run."""
    if cut.outputs != "hopper":
        return cut
    from ridgeline.kernels.scans.ssd import hopper_outputs

    x_THP, b_TGS = given.x_THP, given.b_TGS
    (_, heads, width), (groups, size) = x_THP.shape, b_TGS.shape[1:]
    fits = hopper_outputs.fits(heads, groups, width, size, x_THP.itemsize)
    strides = (x_THP.stride(0), b_TGS.stride(0))
    wide = all(x.data_ptr() % 16 == 0 for x in (x_THP, b_TGS)) and all(x % 8 == 0 for x in strides)
    if not (fits and wide and compute_capability(x_THP.device) == (9, 0)):
        return replace(cut, outputs="shared")
    return replace(cut, chunk=hopper_outputs.CHUNK)


def _segments(work: Work) -> None:
    """Compute the states between segments."""
    given, states = work.given, work.states_NHPS
    _, heads, width, size = states.shape
    left_LH = torch.empty((len(work.sums_LHPS), heads), dtype=torch.float32, device=states.device)
    triton_chunks._segments[(heads * work.parts, len(work.segments.first_C))](
        given.x_THP, given.b_TGS, work.log, work.shift, work.sums_LHPS, left_LH, *work.of_segments,
        given.share, **work.shape, num_warps=work.cut.warps, **work.options,
    )  # fmt: skip
    start_R1, reads_R, _, fresh_R, _, _ = work.metadata.of_rows
    block = min(1024, triton.next_power_of_2(width * size))
    triton_chunks._pass[(heads * triton.cdiv(width * size, block), work.metadata.num_rows)](
        work.sums_LHPS, work.before_LHPS, left_LH, states, start_R1, reads_R, fresh_R, states.stride(0),
        H=heads, SIZE=width * size, SEGMENT=work.cut.segment, BLOCK=block, num_warps=4, **work.options,
    )  # fmt: skip


def _outputs(work: Work) -> None:
    given, cut, chunks, heads = work.given, work.cut, work.chunks, work.y_THP.shape[1]
    groups, many = given.b_TGS.shape[1], len(work.segments.first_C)
    bc, shape = (given.b_TGS, given.c_TGS), work.shape
    products_CGQQ = given.b_TGS.new_empty((len(chunks.first_C), groups, cut.chunk, cut.chunk))
    names = ("BC_TOKEN", "S", "BLOCK_S", "Q", "DOT")
    triton_products._products[(len(chunks.first_C), groups)](
        *bc, products_CGQQ, *chunks.of_chunks, work.metadata.start_R1,
        G=groups, **{name: shape[name] for name in names}, num_warps=4, **work.options,
    )  # fmt: skip
    _, reads_R, writes_R, fresh_R, _, _ = work.metadata.of_rows
    of_outputs = (
        given.x_THP, *bc, given.skip_H, work.log, work.shift, work.weight, products_CGQQ, work.before_LHPS,
        work.sums_LHPS, work.y_THP, work.states_NHPS, *work.of_segments,
        reads_R, writes_R, fresh_R, work.states_NHPS.stride(0), given.share,
    )  # fmt: skip
    if cut.outputs == "shared":
        triton_products._outputs[(heads * work.parts, many)](
            *of_outputs, G=groups, FINITE=triton_products.FINITE, **shape, num_warps=cut.warps, **work.options,
        )  # fmt: skip
        return
    from ridgeline.kernels.scans.ssd import hopper_outputs

    names_of_hopper = ("X_TOKEN", "BC_TOKEN", "H", "P", "S", "Q", "SEGMENT")
    hopper_outputs.ssd_hopper_outputs[(heads // 2, many)](
        *of_outputs, G=groups, **{name: shape[name] for name in names_of_hopper}, STAGES=hopper_outputs.STAGES,
        num_warps=4, **work.options,
    )  # fmt: skip
