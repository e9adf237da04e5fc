"""A step in two segments: forward (tokens in, logits out) and sample (logits in, tokens out, slots advanced).

Per-slot masks may arrive between them. Both read and write only device state, so each can become a captured graph.

Legend: T tokens of the step, R rows, N rows that sample, L likeliest tokens reported, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.cache_spec import CacheLayout
from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan import Feature, Finish, StepPlan
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.batch import Batch, RowTensors, build_batch
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.paged import PagedCache, PagedState


@dataclass(frozen=True)
class DeviceLogprobs:
    """As `StepLogprobs`, still on the device. Rows are the N sampling rows, or a prompt's positions."""

    logprob_N: Tensor
    rank_N: Tensor
    top_ids_NL: Tensor
    top_logprobs_NL: Tensor


@dataclass(frozen=True)
class Forwarded:
    """What the forward segment leaves for the sample segment. logits_NV is float32."""

    batch: Batch
    logits_NV: Tensor
    prompt_logprobs: dict[int, DeviceLogprobs]


@dataclass(frozen=True)
class Sampled:
    """A step's outcome on the device: token_R (-1: none), finish_R (`Finish` codes), logprobs of the N rows."""

    forwarded: Forwarded
    token_R: Tensor
    finish_R: Tensor
    logprobs: DeviceLogprobs | None


class Runner:
    """Executes plans on one device, in the order they come."""

    def __init__(self, decoder: Decoder, ops: Ops, layout: CacheLayout, *, num_slots: int, max_model_len: int) -> None:
        parameter = next(decoder.parameters())
        self.decoder = decoder
        self.device = parameter.device
        self._ops = ops
        self._block_size = layout.block_size
        self._state = PagedState(PagedCache(layout, parameter.dtype, self.device), decoder.spec, ops)
        columns = -(-max_model_len // layout.block_size)
        self.slots = Slots(num_slots, len(layout.groups), columns, decoder.spec.vocab_size, self.device)
        self._rows: RowTensors | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        """Apply the plan's deltas, run the network, score the rows that sample."""
        batch = self.prepare(plan)
        self._state.begin(batch.attention, batch.places)
        hidden_TM = self.decoder(batch.token_ids_T, batch.positions_T, self._state)
        logits_NV = self.decoder.logits(hidden_TM[batch.rows.last_token_N]).float()
        prompt = {}
        if plan.rows.features & Feature.PROMPT_LOGPROBS:
            prompt = {span.row: self._score_prompt(batch, span.row, hidden_TM) for span in plan.spans}
        return Forwarded(batch, logits_NV, {row: scores for row, scores in prompt.items() if scores is not None})

    def prepare(self, plan: StepPlan) -> Batch:
        """Deltas and inputs: everything of a step before the network."""
        if plan.reset:
            self.slots.reset()
        self.slots.apply(plan.deltas)
        if plan.expected is not None:
            self.slots.check(plan.expected)
        rows = self._rows
        if rows is None or rows.rows is not plan.rows:
            self._check_generations(plan)
            rows = self._rows = RowTensors.of(plan.rows, self.device)
        return build_batch(plan, rows, self.slots, self._block_size)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, masks: Mapping[int, np.ndarray]) -> Sampled:
        """Draw a token for every sampling row and advance the slots."""
        batch, logits_NV = forwarded.batch, forwarded.logits_NV
        rows, slots, features = batch.rows, self.slots, batch.plan.rows.features
        in_N = rows.sampling_rows_N
        slots_N, active_N = rows.slots_R[in_N], batch.active_R[in_N]
        position_N = batch.kv_len_R[in_N]
        mask_NV = self._stack_masks(batch, masks) if masks else None
        token_N = self._ops.sample(logits_NV, slots.sampling, slots_N, position_N, features, mask_NV)
        logprobs = None
        if features & Feature.LOGPROBS:
            logprobs = score(logits_NV, token_N, batch.plan.rows.num_logprobs)
        finish_N = self._finish(token_N, slots_N, position_N, active_N)
        token_R = rows.slots_R.new_full((len(rows.rows),), -1)
        token_R[in_N] = torch.where(active_N, token_N, -1)
        finish_R = torch.zeros_like(token_R, dtype=torch.int8)
        finish_R[in_N] = finish_N
        self._advance(batch, token_N, slots_N, active_N, finish_N)
        return Sampled(forwarded, token_R, finish_R, logprobs)

    def _check_generations(self, plan: StepPlan) -> None:
        rows = plan.rows
        held_R = self.slots.generations[rows.slots_R]
        for row in np.flatnonzero(held_R != rows.generations_R):
            raise ContractViolation(
                f"plan {plan.id} names slot {rows.slots_R[row]} generation {rows.generations_R[row]}; "
                f"the worker holds generation {held_R[row]}."
            )

    def _finish(self, token_N: Tensor, slots_N: Tensor, position_N: Tensor, active_N: Tensor) -> Tensor:
        """`Finish` code of each row: a stop id (once min_tokens are out), else the length reached."""
        stops_N = (self.slots.sampling.stop_ids_SE[slots_N] == token_N[:, None]).any(1)
        full_N = position_N + 1 >= self.slots.max_len_S[slots_N]
        finish_N = torch.where(stops_N, Finish.STOP, torch.where(full_N, Finish.LENGTH, Finish.NONE))
        return torch.where(active_N, finish_N, Finish.NONE).to(torch.int8)

    def _advance(self, batch: Batch, token_N: Tensor, slots_N: Tensor, active_N: Tensor, finish_N: Tensor) -> None:
        slots, slots_R = self.slots, batch.rows.slots_R
        slots.kv_len_S[slots_R] = torch.where(batch.active_R, batch.kv_len_R, slots.kv_len_S[slots_R])
        slots.last_token_S[slots_N] = torch.where(active_N, token_N, slots.last_token_S[slots_N])
        slots.stopped_S[slots_N] |= finish_N != Finish.NONE
        if batch.plan.rows.features & Feature.PENALTY:
            slots.sampling.output_count_SV[slots_N, token_N] += active_N.to(torch.int32)

    def _stack_masks(self, batch: Batch, masks: Mapping[int, np.ndarray]) -> Tensor:
        rows = np.flatnonzero(batch.plan.rows.num_logits_R)
        everything = np.ones(self.decoder.spec.vocab_size, np.bool_)
        return torch.from_numpy(np.stack([masks.get(int(row), everything) for row in rows])).to(self.device)

    def _score_prompt(self, batch: Batch, row: int, hidden_TM: Tensor) -> DeviceLogprobs | None:
        """Logprobs of the prompt tokens that this chunk's positions predict; the last known token predicts none."""
        plan = batch.plan
        form = self.slots.forms[int(plan.rows.slots_R[row])]
        count = int(plan.rows.num_tokens_R[row])
        first = int(plan.kv_bound_R[row]) - count + 1
        next_ids = form.prompt[first : first + count]
        if form.params.prompt_logprobs is None or not next_ids:
            return None
        start = int(batch.rows.starts_R1[row])
        logits_PV = self.decoder.logits(hidden_TM[start : start + len(next_ids)]).float()
        return score(logits_PV, torch.tensor(next_ids, device=self.device), form.params.prompt_logprobs)


def score(logits_NV: Tensor, token_N: Tensor, num_top: int) -> DeviceLogprobs:
    """Log-softmax of the chosen tokens, their ranks (1 = likeliest) and the num_top likeliest."""
    logprobs_NV = logits_NV.log_softmax(-1)
    chosen_N1 = logprobs_NV.gather(1, token_N[:, None])
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
    return DeviceLogprobs(chosen_N1[:, 0], (logprobs_NV > chosen_N1).sum(-1) + 1, top.indices, top.values)
