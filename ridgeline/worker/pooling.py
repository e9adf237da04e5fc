"""The end of a step of a model that pools: vectors of the rows whose prompts are complete.

Legend:
    T  tokens of the step
    R  rows whose prompts are complete
    M  width of hidden states, or of a vector
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Finish, StepPlan, StepResult
from ridgeline.core.specs.pooling import TOKENWISE, PoolingSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.worker.adapters.whole import PlacedHeads
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import DeviceStep, Ending, PlannedStep
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.upload import Download, mark, upload

AT_ONCE = 64  # tokens whose numbers are made together where a head is as wide as a vocabulary


class Vectors:
    """The vectors of a plan on their way to the host.

    rows: the plan's rows that have one, in the order of `vectors_RM`.
    tokenwise: rows that have a vector for every token: [T, M] each.
    """

    def __init__(self, plan: StepPlan, rows: np.ndarray, vectors_RM: Tensor, tokenwise: dict[int, Tensor]) -> None:
        self.plan, self._rows, self._tokenwise = plan, rows, list(tokenwise)
        self._download = Download((vectors_RM, *tokenwise.values()))
        self.done: torch.cuda.Event | None = None  # what the device must have passed

    def result(self, watch: Stopwatch) -> StepResult:
        """Wait for the vectors and return them. Raises whatever error the device reports."""
        if self.done is not None:
            self.done.synchronize()
        vectors_RM, *others = self._download.arrays()
        pooled = dict(zip(self._rows.tolist(), vectors_RM, strict=True))
        pooled |= dict(zip(self._tokenwise, others, strict=True))
        count = len(self.plan.rows)
        finish_R = np.zeros(count, np.int8)
        for row, vector in pooled.items():
            finish_R[row] = Finish.STOP if np.isfinite(vector).all() else Finish.NAN
        return StepResult(
            self.plan.id,
            tokens_RK=np.full((count, 1), -1, np.int32),
            emitted_R=np.zeros(count, np.int32),
            finish_R=finish_R,
            pooled=pooled,
            elapsed=watch.seconds(),
        )


class Pooling(Ending):
    """An `Ending` that makes vectors of the hidden states of rows whose prompts are complete.

    heads: the maps behind the pooling that adapters have of their own.
    """

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots) -> None:
        assert decoder.spec.pooling is not None
        self.decoder, self._spec, self._ops, self._slots = decoder, decoder.spec.pooling, ops, slots
        self.heads = PlacedHeads(decoder)

    def forward(self, step: DeviceStep) -> None:
        self._slots.lengthen(step.inputs.slots_R, step.kv_len_R, step.active_R, self._ops)

    def after_forward(self, step: PlannedStep) -> None:
        step.arriving = self._pooled(step.plan, step.device.hidden, step.pictured)

    def expected(self, step: PlannedStep) -> Vectors:
        assert isinstance(step.arriving, Vectors)
        step.arriving.done = mark(self._slots.device)
        return step.arriving

    def _pooled(self, plan: StepPlan, hidden: Hidden, pictured: Mapping[int, Tensor]) -> Vectors:
        """Queue the pooling of a step's hidden states. pictured: the vectors of rows that are pictures."""
        decoder, spec, rows = self.decoder, self._spec, plan.rows
        if decoder.spec.senses_only:
            made = {row: vectors_LM.float() for row, vectors_LM in pictured.items()}
            return Vectors(plan, np.empty(0, np.int64), hidden.x_TM.new_empty((0, 1), dtype=torch.float32), made)
        end_R = np.cumsum(rows.num_tokens_R)
        start_R = end_R - rows.num_tokens_R
        complete = np.flatnonzero(rows.num_logits_R)
        if pictured:
            complete = np.array([row for row in complete if row not in pictured], np.int64)
        forms = self._slots.forms
        by_token = np.array([forms[int(rows.slots_R[row])].task in TOKENWISE for row in complete], bool)
        one_each = complete[~by_token]
        places = [forms[int(slot)].adapter for slot in rows.slots_R]
        tokenwise = {
            row: self._headed(decoder.normed(hidden.at(slice(int(start_R[row]), int(end_R[row])))), places[row])
            for row in complete[by_token].tolist()
        }
        drawn_R = np.fromiter(pictured, np.int64)
        drawn_RM = [torch.stack(list(pictured.values())).float()] if pictured else []
        if not len(one_each):
            none_RM = hidden.x_TM.new_empty((0, 1), dtype=torch.float32)
            return Vectors(plan, drawn_R, drawn_RM[0] if drawn_RM else none_RM, tokenwise)
        if spec.kind in ("max", "sum"):
            spans = ((int(start_R[row]), int(end_R[row]), places[row]) for row in one_each)
            vectors_RM = torch.stack([self._over_tokens(hidden, *span) for span in spans])
            return Vectors(plan, one_each, vectors_RM, tokenwise)
        if spec.kind == "mean":
            vectors_RM = _means(decoder, hidden, rows.num_tokens_R, one_each)
        else:
            index_R = start_R[one_each] if spec.kind == "cls" else end_R[one_each] - 1
            chosen = hidden.at(upload(index_R.astype(np.int64), hidden.x_TM.device))
            if spec.tokens:
                own = [places[row] for row in one_each]
                with nullcontext() if self.adapters is None else self.adapters.scoring(own):
                    return Vectors(plan, one_each, _scores(decoder, chosen, spec), tokenwise)
            vectors_RM = decoder.normed(chosen)
        headed_RM = self.heads(decoder, vectors_RM, [places[row] for row in one_each])
        found_RM = torch.cat((headed_RM.float(), *drawn_RM))
        return Vectors(plan, np.concatenate((one_each, drawn_R)), found_RM, tokenwise)

    def _headed(self, x_TM: Tensor, place: int) -> Tensor:
        """Return vectors of one row's tokens behind its head, float32."""
        return self.heads(self.decoder, x_TM, [place] * len(x_TM)).float()

    def _over_tokens(self, hidden: Hidden, start: int, end: int, place: int) -> Tensor:
        """Return the largest, or the sum, of each number behind the head over some tokens: float32 [M]."""
        decoder, found_M = self.decoder, None
        for first in range(start, end, AT_ONCE):
            x_TM = self._headed(decoder.normed(hidden.at(slice(first, min(end, first + AT_ONCE)))), place)
            own_M = x_TM.amax(0) if self._spec.kind == "max" else x_TM.sum(0)
            if found_M is None:
                found_M = own_M
            else:
                found_M = torch.maximum(found_M, own_M) if self._spec.kind == "max" else found_M + own_M
        assert found_M is not None  # a prompt has tokens
        return found_M


def _means(decoder: Decoder, hidden: Hidden, num_tokens_R: np.ndarray, rows: np.ndarray) -> Tensor:
    """Return the means of these rows' hidden states, summed in float32: [R, M] in the model's dtype."""
    x_TM = decoder.normed(hidden)
    lengths = upload(num_tokens_R.astype(np.int64), x_TM.device)
    means_RM = torch.segment_reduce(x_TM.float(), "mean", lengths=lengths, axis=0, unsafe=True)
    return means_RM[upload(rows.astype(np.int64), x_TM.device)].to(x_TM.dtype)


def _scores(decoder: Decoder, last: Hidden, spec: PoolingSpec) -> Tensor:
    """Return the scores of the spec's tokens as the next one, [R, tokens], or the second's less the first's, [R, 1]."""
    scores_RM = decoder.logits(last)[:, list(spec.tokens)].float()
    return scores_RM[:, 1:] - scores_RM[:, :1] if spec.difference else scores_RM
