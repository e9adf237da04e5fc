"""The two segments of a step on the device: forward (tokens in, scores out) and sample (scores in, tokens out, slots
advanced). Token masks are applied between them. The segments read and write device memory only and never look at a
value, so each of them can be captured as a graph.

Legend:
    T  tokens of the step
    R  rows
    U  tokens of this rank's part of the vocabulary; all of them, if there is one rank
    M  model width
    A  cache groups
    S  slots
    C  columns of a block table
    E  stop ids of a slot
    K  tokens that a row may emit, at most
    P  positions that are scored, where rows verify drafts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature, StepPlan
from ridgeline.core.settings.speculation import verified_widths
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder, GivenRows, Hidden, Taps
from ridgeline.layers.experts import Experts
from ridgeline.worker.guidance import Guides
from ridgeline.worker.inputs import DeviceInputs, Shape
from ridgeline.worker.mailbox import Mailbox
from ridgeline.worker.masks import Masks
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.sleep import SleepMemory
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.speculation.proposer import Proposer, Ran, Taken
from ridgeline.worker.state.states import DeviceRows, States, Verified
from ridgeline.worker.vocabulary import Vocabulary

SAMPLING = (  # the features that the sampling op handles
    Feature.RANDOM | Feature.FILTER | Feature.TYPICAL | Feature.PENALTY | Feature.BIAS | Feature.MIN_TOKENS
)


@dataclass(frozen=True)
class HostLengths:
    """The lengths of a step's rows as far as the host knows them, for ops that size their work on the host. Inside a
    graph there are none.

    whole: all tokens must be here, because prompts are scored or came as vectors.
    verify_R: the rows that verify drafts, bool.
    marks_R: after how many of its tokens a row's state is stored as well (`Rows.marks_R`).
    """

    num_tokens_R: np.ndarray
    kv_bound_R: np.ndarray
    whole: bool = False
    verify_R: np.ndarray | None = None
    marks_R: np.ndarray | None = None


@dataclass(frozen=True)
class Scores:
    """The output of the forward segment.

    active_R: True for rows that the device has not stopped.
    kv_len_R: tokens cached after the step (1 for stopped rows, so that their attention stays defined).
    logits_RU: the scores of every row's last token, or [P, U] where rows verify drafts; none on a stage of a pipeline
        that is not the last, and of a model that pools.
    hidden: the hidden state of all tokens that were run here, from which prompts are scored, which the next stage
        gets, or which is pooled.
    index_P: where rows verify drafts, the index of the token that is drawn at each position.
    taken: what the proposer needs of the step's tokens to draft behind them.
    """

    active_R: Tensor
    kv_len_R: Tensor
    logits_RU: Tensor
    hidden: Hidden
    index_P: Tensor | None = None
    taken: Taken | None = None


@dataclass(frozen=True)
class Outcome:
    """The output of the sample segment, in one piece of memory that is posted: token_RK, int32 (-1: none), then
    finish_R, int8 (`Finish` codes), and where rows verify drafts drafted_R, int8. columns: K; 1: none verifies any.
    path_RK: as in `step_verify`, where rows verify trees."""

    packed: Tensor
    num_rows: int
    columns: int
    path_RK: Tensor | None = None

    @staticmethod
    def empty(num_rows: int, device: torch.device, columns: int = 1) -> Outcome:
        return Outcome(
            torch.empty(Outcome.size(num_rows, columns), dtype=torch.uint8, device=device), num_rows, columns
        )

    @staticmethod
    def size(num_rows: int, columns: int = 1) -> int:
        return (4 * columns + 1 + (columns > 1)) * num_rows

    @property
    def token_RK(self) -> Tensor:
        return self.packed[: 4 * self.columns * self.num_rows].view(torch.int32).view(self.num_rows, self.columns)

    @property
    def token_R(self) -> Tensor:
        """The tokens of rows that emit one at most."""
        return self.packed[: 4 * self.num_rows].view(torch.int32)

    @property
    def finish_R(self) -> Tensor:
        return self.packed[4 * self.columns * self.num_rows :][: self.num_rows].view(torch.int8)

    @property
    def drafted_R(self) -> Tensor:
        """The number of drafts that each row verified."""
        return self.packed[-self.num_rows :].view(torch.int8)

    def read(self, octets: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens, finish codes and numbers of drafts of the first rows from a copy of the memory."""
        split = 4 * self.columns * self.num_rows
        token_RK, codes = octets[:split].view(np.int32).reshape(-1, self.columns), octets[split:].view(np.int8)
        drafted_R = codes[self.num_rows :][:rows].astype(np.int32) if self.columns > 1 else None
        return token_RK[:rows], codes[:rows], drafted_R


class SampledRows(Protocol):
    """The rows of a step, as its sample segment needs them (`DeviceInputs`)."""

    @property
    def num_rows(self) -> int: ...
    @property
    def slots_R(self) -> Tensor: ...
    @property
    def samples_R(self) -> Tensor: ...


class Segments:
    """The model, its cache and the slots, as two functions of a step's inputs.

    divide_from: the tokens of a step from which on the ranks of `mesh.cp` divide them.
    proposer: makes the drafts that rows verify; None: they verify none.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        layout: CacheLayout,
        slots: Slots,
        divide_from: int | None = None,
        sleep: SleepMemory | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        dtype, device = decoder.dtype, next(decoder.parameters()).device
        self.decoder = decoder
        self.slots = slots
        self._ops = ops
        self.vocabulary = Vocabulary(decoder.spec.vocab_size, decoder.tp, ops)
        self._block_size = layout.block_size
        self._ring, self._divide_from = decoder.mesh.cp, divide_from
        self._recurs = any(group.spec.exact for group in layout.groups)
        layers = decoder.spec.layers + (() if proposer is None else proposer.layers)
        model = replace(decoder.spec, layers=layers)
        self.states = States(layout, model, dtype, device, ops, self._ring, sleep)
        self._before_TM = torch.zeros(0, decoder.spec.handed_width, dtype=dtype, device=device)
        self._tallies = [module.tally_E for module in decoder.modules() if isinstance(module, Experts)]
        self.proposer, self._drafts_SD = proposer, None if proposer is None else proposer.drafts_SD
        self.widths: tuple[int, ...] = ()  # drafts of a row, where all rows of a step verify as many
        if proposer is not None:
            self.widths = verified_widths(proposer.drafts_SD.shape[1], whole=proposer.tree_SN is not None)
        self.each = 1 + max(self.widths, default=0)  # tokens of a row that verifies drafts, at most
        self.columns = 1 if proposer is None else 1 + proposer.depth  # tokens that a row emits, at most
        self.mailbox = Mailbox(Outcome.size(slots.dummy, self.columns), ops, device)

    def inputs(
        self,
        shape: Shape,
        device: torch.device,
        plan: StepPlan | None = None,
        *,
        cascade: bool = False,
    ) -> DeviceInputs:
        """Return inputs for a step of this shape. cascade: they name the rows that share their first blocks."""
        return DeviceInputs(shape, self.slots.dummy, device, plan, cascade=cascade)

    def forward(
        self,
        inputs: DeviceInputs,
        lengths: HostLengths | None = None,
        given: GivenRows | None = None,
        drafts: Drafts | None = None,
        catching: Catching | None = None,
    ) -> Scores:
        """Run the network and score every row's last token, or the positions of `drafts`.

        given: vectors of tokens that came as such.
        catching: the time at which a network that drafts runs over the step's tokens; None: that of a step of these
            shapes in a graph.
        """
        slots = self.slots
        share = None if self._divide_from is None else self._share(inputs, lengths, self._divide_from)
        trees_SN = None if drafts is None or self.proposer is None else self.proposer.tree_SN
        token_ids_T, positions_T, places_AT, kv_len_R, last_R, active_R, live_T, tree = self._ops.step_inputs(
            inputs.slots_R,
            inputs.start_R1,
            inputs.override_T,
            slots.kv_len_S,
            slots.last_token_S,
            slots.stopped_S,
            slots.block_tables_ASC,
            self._block_size,
            self._drafts_SD,
            trees_SN,
        )
        rows = DeviceRows(
            slots_R=inputs.slots_R,
            start_R1=inputs.start_R1,
            kv_len_R=kv_len_R,
            last_R=last_R,
            num_tokens=inputs.num_tokens,
            tokens_each=inputs.tokens_each,
            marks_R=inputs.marks_R,
            prefix_4R=inputs.prefix_4R,
            num_tokens_R=lengths.num_tokens_R if lengths else None,
            kv_bound_R=lengths.kv_bound_R if lengths else None,
            verifies=drafts is not None,
            verify_R=lengths.verify_R if lengths and inputs.tokens_each == 0 else None,
            share=share,
            tree=tree,
        )
        if share is not None:
            mine_t = share.mine_t
            token_ids_T, positions_T, live_T = token_ids_T[mine_t], positions_T[mine_t], live_T[mine_t]
        self.states.begin(rows, slots.block_tables_ASC.unbind(), places_AT.unbind(), live_T)
        if share is not None:
            with share.counting(self._tallies):
                hidden = self.decoder(token_ids_T, positions_T, self.states)
            return Scores(active_R, kv_len_R, self.decoder.own_logits(share.last(hidden, inputs.num_rows)), hidden)
        before_TM = None if self.decoder.spec.embeds else self.before(inputs.num_tokens)
        taken, taps = None, None if self.proposer is None else Taps(self.proposer.taps, [])
        hidden = self.decoder(token_ids_T, positions_T, self.states, before_TM, given, taps)
        if self.proposer is not None and taps is not None:
            catching = self.catching(inputs.tokens_each) if catching is None else catching
            ran = Ran(token_ids_T, positions_T, inputs.start_R1, inputs.slots_R, hidden, taps.found, live_T)
            taken = self.proposer.catch_up(ran, self.states, catching)
        if self.decoder.spec.pooling is not None:
            self._lengthen(inputs, kv_len_R, active_R)
            return Scores(active_R, kv_len_R, hidden.x_TM.new_empty(0), hidden)
        if not self.decoder.spec.scores:
            self._lengthen(inputs, kv_len_R, active_R)
            x_TM = self.decoder.handed_on(hidden)
            return Scores(active_R, kv_len_R, x_TM.new_empty(0), Hidden(x_TM, None))
        index_P = None
        if drafts is not None:
            last = hidden if drafts.scored_P is None else self._at(hidden, drafts.scored_P)
            index_P = 1 + (positions_T if drafts.scored_P is None else positions_T[drafts.scored_P])
        else:
            last = hidden if inputs.tokens_each == 1 else self._at(hidden, last_R)
        return Scores(active_R, kv_len_R, self.decoder.own_logits(last), hidden, index_P, taken)

    @staticmethod
    def catching(tokens_each: int) -> Catching:
        """Return the moment at which a network that drafts runs over the tokens of a step in a graph, whose rows have
        so many each. Behind a step whose rows verify drafts more of them are wanted."""
        return {0: Catching.NOW, 1: Catching.LATER}.get(tokens_each, Catching.BEHIND)

    def rehearse(self) -> None:
        """Run a network that drafts over all numbers of tokens for which its kernels are compiled."""
        if self.proposer is not None and (backlog := self.proposer.backlog) is not None:
            for tokens in backlog.sizes:
                self.proposer.settle(backlog.pretend(tokens), self.states)

    def before(self, tokens: int) -> Tensor:
        """Return the memory for what the stage before hands on of so many tokens: always the same, once it has been
        asked for the most. [T, M], or [T, 2 M] with the tokens as they were embedded"""
        if tokens > len(self._before_TM):
            self._before_TM = self._before_TM.new_zeros(tokens, self._before_TM.shape[1])
        return self._before_TM[:tokens]

    def _lengthen(self, inputs: DeviceInputs, kv_len_R: Tensor, active_R: Tensor) -> None:
        """Let the slots know how far their caches reach now. Their tokens come later (`worker/relay.py`)."""
        slots, outcome = self.slots, Outcome.empty(inputs.num_rows, inputs.slots_R.device)
        self._ops.step_advance(
            inputs.slots_R,  # any numbers, since no row samples
            torch.zeros_like(active_R),
            inputs.slots_R,
            kv_len_R,
            active_R,
            slots.sampling.stop_ids_SE,
            slots.max_len_S,
            slots.kv_len_S,
            slots.last_token_S,
            slots.stopped_S,
            None,
            outcome.token_R,
            outcome.finish_R,
        )

    def _share(self, inputs: DeviceInputs, lengths: HostLengths | None, divide_from: int) -> Stripes | Stretches | None:
        """Return this rank's share of a step whose tokens are worth dividing, else None."""
        if lengths is None or lengths.whole or int(lengths.num_tokens_R.sum()) < divide_from:
            return None
        counts = lengths.num_tokens_R, lengths.kv_bound_R
        stripes = Stripes(self._ring, *counts, inputs.slots_R.device)
        if not stripes.count_N.all():
            return None
        return Stretches(self._ring, stripes, lengths.marks_R) if self._recurs else stripes

    def _at(self, hidden: Hidden, index_R: Tensor) -> Hidden:
        """Return rows as `Hidden.at` does, by launches that need not wait for each other."""
        residual_TM, rows_of = hidden.residual_TM, self._ops.embedding
        return Hidden(rows_of(index_R, hidden.x_TM), None if residual_TM is None else rows_of(index_R, residual_TM))

    def mask(self, scores: Scores, masks: Masks) -> None:
        """Forbid tokens in the scores, in place, before tokens are drawn."""
        self._ops.mask_logits(scores.logits_RU, masks.bits_UW, masks.row_U)

    def sample(
        self,
        inputs: SampledRows,
        scores: Scores,
        features: Feature,
        guides: Guides | None = None,
        drafts: Drafts | None = None,
        wanted: int | None = None,
    ) -> Outcome:
        """Draw a token for every row that emits one, or for every position that was scored where rows verify drafts;
        advance the slots, make drafts, and post the outcome.

        guides: the guides that made `scores`, if any did.
        wanted: how many drafts the next step may verify of a row; None: as many as this one does.
        """
        slots, columns, path_RK = self.slots, 1 if drafts is None else drafts.emits, None
        outcome = Outcome.empty(inputs.num_rows, inputs.slots_R.device, columns)
        advancing = (
            inputs.slots_R,
            scores.kv_len_R,
            scores.active_R,
            slots.sampling.stop_ids_SE,
            slots.max_len_S,
            slots.kv_len_S,
            slots.last_token_S,
            slots.stopped_S,
            slots.sampling.output_count_SV if features & Feature.PENALTY else None,
        )
        if drafts is None:
            token_R = self.vocabulary.sample(
                scores.logits_RU, slots.sampling, inputs.slots_R, scores.kv_len_R, features & SAMPLING
            )
            # Ranks of a ring have each scored by themselves; they must never go on with unlike tokens
            if self._ring.size > 1:
                token_R = self._ring.stacked(token_R)[0]
            token_R = token_R if guides is None else guides.tokens(token_R)
            self._ops.step_advance(token_R, inputs.samples_R, *advancing, outcome.token_R, outcome.finish_R)
        else:
            assert self._drafts_SD is not None
            assert self.proposer is not None
            token_P = self._draw_behind(inputs.slots_R, scores, drafts, features & SAMPLING)
            if guides is not None:
                token_P = torch.cat((guides.tokens(token_P[: inputs.num_rows]), token_P[inputs.num_rows :]))
            if self.proposer.tree_SN is not None:
                path_RK = torch.empty_like(outcome.token_RK)
            places_RN, num_logits_R = drafts.places_RN, drafts.num_logits_R
            found = outcome.token_RK, outcome.finish_R, outcome.drafted_R, self.proposer.tree_SN, path_RK
            self._ops.step_verify(token_P, places_RN, num_logits_R, self._drafts_SD, *advancing, *found)
            come = inputs.slots_R, scores.kv_len_R, scores.active_R, drafts.num_logits_R, slots.kv_len_S
            self.states.keep(Verified(*come, drafts.columns, path_RK), slots.block_tables_ASC.unbind())
        if self.proposer is not None:
            wanted = (0 if drafts is None else drafts.columns - 1) if wanted is None else wanted
            taken = scores.taken
            if drafts is not None and path_RK is not None and taken is not None:
                taken = taken._replace(path_RK=path_RK, drawn_RN=drafts.drawn(token_P))
            emitted = outcome.token_RK, inputs.slots_R
            self.proposer.note(*emitted, self.states, features & SAMPLING, wanted, taken)
        self.mailbox.post(outcome.packed)
        return replace(outcome, path_RK=path_RK)

    def _draw_behind(self, slots_R: Tensor, scores: Scores, drafts: Drafts, features: Feature) -> Tensor:
        """Return the tokens drawn at all positions. [P]

        Penalties count the drafts before a position as if they had been emitted: where they are not, the tokens
        drawn behind them are not used.
        """
        slots_P, index_P = slots_R[drafts.row_P], scores.index_P
        assert index_P is not None
        if not features & Feature.PENALTY:
            return self.vocabulary.sample(scores.logits_RU, self.slots.sampling, slots_P, index_P, features)
        assert self._drafts_SD is not None
        count_SV = self.slots.sampling.output_count_SV
        token_P = torch.empty_like(drafts.row_P)
        counted = []
        for column in range(drafts.columns):
            at = (drafts.column_P == column).nonzero()[:, 0]
            if column > 0:
                draft_P = self._drafts_SD[slots_P[at].long(), column - 1].long()
                there = draft_P >= 0
                counted.append((slots_P[at].long()[there], draft_P[there]))
                count_SV.index_put_(counted[-1], count_SV.new_ones(()), accumulate=True)
            token_P[at] = self.vocabulary.sample(
                scores.logits_RU[at], self.slots.sampling, slots_P[at], index_P[at], features
            )
        for places in counted:
            count_SV.index_put_(places, -count_SV.new_ones(()), accumulate=True)
        return token_P
