"""The chunks of a step, and their launches on Hopper.

Legend: that of triton_prepare.py, and
    D  segments
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.scans.gated_delta import segments
from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.gated_delta.plan import Plan
from ridgeline.kernels.scans.gated_delta.triton_prepare import CHUNK
from ridgeline.kernels.scans.metadata import ScanMetadata


class Work(NamedTuple):
    """The tensors that the chunks of a step are made of, and those for the results.

    solve_GTL, within_GTL, factors_GFT: what triton_prepare.py computes.
    short: rows of so many tokens do not run in chunks.
    """

    given: DeltaInputs
    states_NGKV: Tensor
    metadata: ScanMetadata
    o_TGV: Tensor
    solve_GTL: Tensor
    within_GTL: Tensor
    factors_GFT: Tensor
    short: int

    @property
    def shape(self) -> dict[str, int]:
        """Return the constants of all kernels."""
        (heads, keys), (value_heads, values) = self.given.k_THK.shape[1:], self.o_TGV.shape[1:]
        return {"H": heads, "G": value_heads, "K": keys, "V": values, "L": CHUNK, "SHORT": self.short}


def run_on_hopper(work: Work, plan: Plan, part: int, part_chunks: int) -> None:
    """Run a part of the chunks, or all of them, by the plan's kernel."""
    from ridgeline.kernels.scans.gated_delta.hopper_states import CARRIES, OUTPUTS, ROWS

    (value_heads, values), keys, device = work.o_TGV.shape[1:], work.given.k_THK.shape[2], work.o_TGV.device
    if not plan.segment:
        chunks = work.metadata.chunks(CHUNK)
        table = (*chunks.of_chunks, chunks.of_R1, work.factors_GFT)
        _run(work, plan, (values // plan.columns, value_heads, work.metadata.num_rows), table, ROWS, part, part_chunks)
        return
    parts = work.metadata.chunks(plan.segment)
    number = len(parts.first_C)
    carried_DGCK = torch.empty((number, value_heads, values + keys, keys), dtype=torch.float32, device=device)
    table = (*parts.of_chunks, parts.of_R1, carried_DGCK)
    carries = plan._replace(columns=plan.carry_columns or plan.columns)
    _run(work, carries, ((values + keys) // carries.columns, value_heads, number), table, CARRIES, 0, 0)
    start_R1, reads_R, _, fresh_R, _, _ = work.metadata.of_rows
    segments._gated_delta_carry[(values // segments.COLUMNS, value_heads, work.metadata.num_rows)](
        carried_DGCK, work.states_NGKV, start_R1, reads_R, fresh_R, parts.of_R1, work.states_NGKV.stride(0),
        G=value_heads, K=keys, V=values, BV=segments.COLUMNS, SHORT=work.short, STAGES=segments.STAGES,
        num_warps=segments.WARPS, **launch_options(device),
    )  # fmt: skip
    _run(work, plan, (values // plan.columns, value_heads, number), table, OUTPUTS, 0, 0)


def _run(
    work: Work, plan: Plan, grid: tuple[int, int, int], table: tuple[Tensor, ...], run: int, part: int, part_chunks: int
) -> None:
    """Launch hopper_chunks.py."""
    from ridgeline.kernels.scans.gated_delta import hopper_chunks

    boxes, wide, given = hopper_chunks.boxes, plan.columns // hopper_chunks.COLUMNS, work.given
    limit = {"maxnreg": hopper_chunks.REGISTERS} if wide == 1 else {}
    hopper_chunks.gated_delta_hopper_chunks[grid](
        boxes(given.q_THK.flatten(1), given.k_THK.shape[2]), boxes(given.k_THK.flatten(1), given.k_THK.shape[2]),
        boxes(given.v_TGV.flatten(1), hopper_chunks.COLUMNS), boxes(work.solve_GTL.flatten(0, 1), CHUNK),
        boxes(work.within_GTL.flatten(0, 1), CHUNK), work.factors_GFT, work.states_NGKV, work.o_TGV,
        *work.metadata.of_rows, *table, work.states_NGKV.stride(0), work.metadata.num_tokens, part, part_chunks,
        **work.shape, WIDE=wide, STAGES=plan.stages, RUN=run, num_warps=4, **limit,
        **launch_options(work.o_TGV.device),
    )  # fmt: skip
