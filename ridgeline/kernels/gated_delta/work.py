"""The chunks of a step, and their launches on Hopper.

Legend: that of triton_prepare.py, and
    D  segments
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.gated_delta import segments
from ridgeline.kernels.gated_delta.plan import Plan
from ridgeline.kernels.gated_delta.triton_prepare import CHUNK
from ridgeline.kernels.launch import launch_options
from ridgeline.kernels.turns import Turns


class Work(NamedTuple):
    """The tensors that the chunks of a step are made of, and those for the results.

    solve_GTL, within_GTL, factors_GFT: what triton_prepare.py computes.
    short: rows of so many tokens do not run in chunks.
    """

    q_THK: Tensor
    k_THK: Tensor
    v_TGV: Tensor
    solve_GTL: Tensor
    within_GTL: Tensor
    factors_GFT: Tensor
    states_NGKV: Tensor
    o_TGV: Tensor
    turns: Turns
    short: int

    @property
    def shape(self) -> dict[str, int]:
        """Return the constants of a kernel for Hopper."""
        (heads, keys), (value_heads, values) = self.k_THK.shape[1:], self.v_TGV.shape[1:]
        return {"H": heads, "G": value_heads, "K": keys, "V": values, "L": CHUNK, "SHORT": self.short}

    @property
    def of_rows(self) -> tuple[Tensor, ...]:
        turns, fresh_R = self.turns, self.turns.fresh_R.view(torch.uint8)
        return turns.start_R1, turns.reads_R, turns.writes_R, fresh_R, turns.marks_R, turns.marked_R


def run_on_hopper(work: Work, plan: Plan, part: int, part_chunks: int) -> None:
    """Run a part of the chunks, or all of them, by the plan's kernel."""
    from ridgeline.kernels.gated_delta.hopper_states import CARRIES, OUTPUTS, ROWS

    (value_heads, values), keys, device = work.v_TGV.shape[1:], work.k_THK.shape[2], work.k_THK.device
    if not plan.segment:
        chunks = work.turns.chunks(CHUNK)
        table = (chunks.first_C, chunks.length_C, chunks.row_C, chunks.of_R1, work.factors_GFT)
        _run(work, plan, (values // plan.columns, value_heads, work.turns.num_rows), table, ROWS, part, part_chunks)
        return
    parts = work.turns.chunks(plan.segment)
    number = len(parts.first_C)
    carried_DGCK = torch.empty((number, value_heads, values + keys, keys), dtype=torch.float32, device=device)
    table = (parts.first_C, parts.length_C, parts.row_C, parts.of_R1, carried_DGCK)
    carries = plan._replace(columns=plan.carry_columns or plan.columns)
    _run(work, carries, ((values + keys) // carries.columns, value_heads, number), table, CARRIES, 0, 0)
    start_R1, reads_R, _, fresh_R, _, _ = work.of_rows
    segments._gated_delta_carry[(values // segments.COLUMNS, value_heads, work.turns.num_rows)](
        carried_DGCK, work.states_NGKV, start_R1, reads_R, fresh_R, parts.of_R1, work.states_NGKV.stride(0),
        G=value_heads, K=keys, V=values, BV=segments.COLUMNS, SHORT=work.short, STAGES=segments.STAGES,
        num_warps=segments.WARPS, **launch_options(device),
    )  # fmt: skip
    _run(work, plan, (values // plan.columns, value_heads, number), table, OUTPUTS, 0, 0)


def _run(
    work: Work, plan: Plan, grid: tuple[int, int, int], table: tuple[Tensor, ...], run: int, part: int, part_chunks: int
) -> None:
    """Launch hopper_chunks.py."""
    from ridgeline.kernels.gated_delta import hopper_chunks

    boxes, wide = hopper_chunks.boxes, plan.columns // hopper_chunks.COLUMNS
    limit = {"maxnreg": hopper_chunks.REGISTERS} if wide == 1 else {}
    hopper_chunks.gated_delta_hopper_chunks[grid](
        boxes(work.q_THK.flatten(1), work.k_THK.shape[2]), boxes(work.k_THK.flatten(1), work.k_THK.shape[2]),
        boxes(work.v_TGV.flatten(1), hopper_chunks.COLUMNS), boxes(work.solve_GTL.flatten(0, 1), CHUNK),
        boxes(work.within_GTL.flatten(0, 1), CHUNK), work.factors_GFT, work.states_NGKV, work.o_TGV, *work.of_rows,
        *table, work.states_NGKV.stride(0), work.turns.num_tokens, part, part_chunks, **work.shape,
        WIDE=wide, STAGES=plan.stages, RUN=run, num_warps=4, **limit,
        **launch_options(work.k_THK.device),
    )  # fmt: skip
