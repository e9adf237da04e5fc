"""From a plan to the tensors of one step. What depends on the rows alone is kept while the plan's `Rows` object stays
the same, so a steady decode step uploads nothing: inputs and positions come from the slots.

Legend: T tokens of the step, R rows, N rows that sample, S slots, C columns of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.cache_spec import NULL_BLOCK
from ridgeline.core.plan import Rows, Span, StepPlan
from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.worker.slots import Slots


@dataclass(frozen=True, kw_only=True)
class RowTensors:
    """What follows from `Rows`. row_T and offset_T are None when every row has one token.

    last_token_N: index among T of each sampling row's last token.
    """

    rows: Rows
    slots_R: Tensor
    num_tokens_R: Tensor
    start_R1: Tensor
    row_T: Tensor | None
    offset_T: Tensor | None
    sampling_rows_N: Tensor
    last_token_N: Tensor
    starts_R1: np.ndarray

    @staticmethod
    def of(rows: Rows, device: torch.device) -> RowTensors:
        num_tokens_R = rows.num_tokens_R.astype(np.int64)
        starts_R1 = np.concatenate([[0], np.cumsum(num_tokens_R)])
        ragged = len(rows) != starts_R1[-1]
        row_T = np.repeat(np.arange(len(rows)), num_tokens_R) if ragged else None
        sampling_rows_N = np.flatnonzero(rows.num_logits_R)

        def upload(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

        return RowTensors(
            rows=rows,
            slots_R=upload(rows.slots_R),
            num_tokens_R=upload(num_tokens_R),
            start_R1=upload(starts_R1),
            row_T=upload(row_T) if row_T is not None else None,
            offset_T=upload(np.arange(starts_R1[-1]) - starts_R1[row_T]) if row_T is not None else None,
            sampling_rows_N=upload(sampling_rows_N),
            last_token_N=upload(starts_R1[sampling_rows_N + 1] - 1),
            starts_R1=starts_R1,
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's inputs. active_R: rows the device has not stopped. kv_len_R: tokens cached after the step (1 for
    stopped rows, so that their attention stays defined)."""

    plan: StepPlan
    rows: RowTensors
    token_ids_T: Tensor
    positions_T: Tensor
    active_R: Tensor
    kv_len_R: Tensor
    attention: Sequence[RaggedBatch]
    places: Sequence[Tensor]


def build_batch(plan: StepPlan, rows: RowTensors, slots: Slots, block_size: int) -> Batch:
    """Derive inputs, positions and cache places from the slots. Nothing is read back from the device."""
    start_R, active_R = slots.kv_len_S[rows.slots_R], ~slots.stopped_S[rows.slots_R]
    token_ids_T = slots.last_token_S[rows.slots_R]
    positions_T, active_T, slots_T = start_R, active_R, rows.slots_R
    if rows.row_T is not None and rows.offset_T is not None:
        token_ids_T, active_T, slots_T = token_ids_T[rows.row_T], active_R[rows.row_T], rows.slots_R[rows.row_T]
        positions_T = start_R[rows.row_T] + rows.offset_T
    if plan.spans:
        token_ids_T = _with_spans(token_ids_T, plan.spans, rows.starts_R1)
    kv_len_R = torch.where(active_R, start_R + rows.num_tokens_R, 1)
    positions_T = torch.where(active_T, positions_T, 0)
    attention, places = [], []
    for table_SC in slots.block_tables_SC:
        block_T = torch.where(active_T, table_SC[slots_T, positions_T // block_size], NULL_BLOCK)
        places.append(block_T * block_size + positions_T % block_size)
        attention.append(
            RaggedBatch(
                slots_R=rows.slots_R,
                block_table_SC=table_SC,
                start_R1=rows.start_R1,
                kv_len_R=kv_len_R,
                num_tokens_R=rows.rows.num_tokens_R,
                kv_bound_R=plan.kv_bound_R,
            )
        )
    return Batch(
        plan=plan,
        rows=rows,
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        active_R=active_R,
        kv_len_R=kv_len_R,
        attention=attention,
        places=places,
    )


def _with_spans(token_ids_T: Tensor, spans: Sequence[Span], starts_R1: np.ndarray) -> Tensor:
    """Put the spans' token ids over what the slots would have fed."""
    given_T = np.full(starts_R1[-1], -1, np.int64)
    for span in spans:
        start = starts_R1[span.row]
        given_T[start : start + len(span.token_ids)] = span.token_ids
    ids_T = torch.from_numpy(given_T).to(token_ids_T.device)
    return torch.where(ids_T >= 0, ids_T, token_ids_T)
