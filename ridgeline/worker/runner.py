"""Executes plans on one device, in their order: deltas to the slots, inputs, forward segment, sample segment.

Token masks may arrive between the segments. Steps that fit a captured graph replay it. The others (long prompts, rare
sampling features, CPUs) run the same segments op by op.

Legend:
    T  tokens of the step, or those of them whose scores are wanted
    R  rows
    U  tokens of this rank's part of the vocabulary; all of them, if there is one rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.plan.step import Feature, MaskedDrafts, RowKind, Rows, StepPlan, reports_apart
from ridgeline.core.settings.speculation import Speculation
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.scoring import DeviceLogprobs
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.worker.embeds import InsertedVectors
from ridgeline.worker.graphs import Graph, Graphs, Progress
from ridgeline.worker.guidance import Guides
from ridgeline.worker.inputs import DeviceInputs, Shape
from ridgeline.worker.mailbox import Letter
from ridgeline.worker.masks import Masks
from ridgeline.worker.moving import Mover
from ridgeline.worker.pooling import Vectors, pooled
from ridgeline.worker.relay import KeptRows, Relay
from ridgeline.worker.saturation import Saturation
from ridgeline.worker.segments import HostLengths, Outcome, SampledRows, Scores, Segments
from ridgeline.worker.sleep import SleepMemory, forget_pages
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.cut import Cut
from ridgeline.worker.speculation.drafts import Drafts, drafts_wanted
from ridgeline.worker.speculation.methods import Network, proposer_of
from ridgeline.worker.speculation.proposer import Proposer
from ridgeline.worker.tallies import Tallies
from ridgeline.worker.upload import upload

# Positions of a prompt that are scored at once. Their logits are in memory several times, in float32.
SCORED_AT_ONCE = 256


@dataclass(frozen=True)
class Forwarded:
    """The output of the forward segment, which the sample segment takes. plan: with the tokens that ran. wanted: how
    many drafts of a row the next step may verify."""

    plan: StepPlan
    inputs: SampledRows
    scores: Scores
    graph: Graph | None
    prompt_logprobs: dict[int, DeviceLogprobs]
    drafts: Drafts | None = None
    wanted: int = 0

    @property
    def rows(self) -> KeptRows:
        """All that the rows need to advance, in memory of its own: a graph's next step overwrites the graph's."""
        inputs, scores = self.inputs, self.scores
        kept = KeptRows(inputs.slots_R, inputs.samples_R, scores.kv_len_R, scores.active_R)
        return kept.copied(len(self.plan.rows))

    def kept(self) -> Forwarded:
        """Return the same in memory of its own, which a step in the same graph does not overwrite."""
        rows, logits_RU = self.rows, self.scores.logits_RU[: len(self.plan.rows)].clone()
        scores = replace(self.scores, active_R=rows.active_R, kv_len_R=rows.kv_len_R, logits_RU=logits_RU)
        return replace(self, inputs=rows, scores=scores, graph=None)


@dataclass(frozen=True)
class Sampled:
    """The outcome of a step, on the device and on its way to the host. Rows beyond the plan's are padding."""

    forwarded: Forwarded
    outcome: Outcome
    letter: Letter
    logprobs: DeviceLogprobs | None
    apart: dict[int, DeviceLogprobs]


class Runner:
    """The model, its state and its graphs on one device.

    cascade: in decode steps attention lets rows of a prefix group read their common blocks together.
    divide_from: as in `Segments`.
    sleep: the memory of weights and cache, if it may be given back while the engine sleeps.
    speculation: how drafts are made that rows verify.
    draft: the network that makes them, where one does.

    draws: True unless a later stage of a pipeline draws the tokens, or the model pools.
    pools: True if prompts end with vectors instead of tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        layout: CacheLayout,
        *,
        num_slots: int,
        max_model_len: int,
        cascade: bool = False,
        divide_from: int | None = None,
        sleep: SleepMemory | None = None,
        speculation: Speculation | None = None,
        draft: Network | None = None,
    ) -> None:
        self.decoder = decoder
        self.device = next(decoder.parameters()).device
        self.inserted = InsertedVectors(self.device)
        # A multiple of 16, for which Triton specializes kernels: so every length runs the same kernels
        drafts = 0 if speculation is None else speculation.num_drafts
        ahead = 0 if speculation is None else max(drafts, speculation.drafted_ahead)
        columns = -(-(max_model_len + drafts + ahead) // (16 * layout.block_size)) * 16
        self.pools = decoder.spec.pooling is not None
        vocabulary = 1 if self.pools else decoder.spec.vocab_size  # of the tables by which tokens are drawn
        self.slots = Slots(num_slots, len(layout.groups), columns, vocabulary, self.device)
        self.proposer: Proposer | None = None
        if speculation is not None:
            sizes = {"max_model_len": max_model_len, "block_size": layout.block_size}
            self.proposer = proposer_of(speculation, decoder, self.slots, ops, **sizes, draft=draft)
        self.cut = Cut(self.proposer.drafts_SD) if self.proposer is not None and self.device.type == "cpu" else None
        self.segments = Segments(decoder, ops, layout, self.slots, divide_from, sleep, self.proposer)
        self._sleep, self._asleep = sleep, frozenset[Kind]()
        self.tallies, self.saturation = Tallies(decoder), Saturation(decoder)
        self.mover = Mover(decoder)
        self.pipe, self.draws = decoder.mesh.pp, decoder.spec.scores and not self.pools
        self.relay = Relay(self.pipe, self.slots, ops)
        self._cascade = cascade
        self._graphs: Graphs | None = None
        self._round: Graph | None = None  # what all ranks that exchange tokens replay in this step
        self._inputs: DeviceInputs | None = None
        self._guided: tuple[Rows, int, Guides] | None = None  # the newest guides, with the arguments they were made of

    def capture(self, *, max_rows: int, max_tokens: int, progress: Progress | None = None) -> None:
        """Capture graphs for steps of up to `max_rows` rows and `max_tokens` tokens (the largest steps are not
        captured). CUDA only."""
        if self.pipe.rank > 0:
            self.segments.before(max_tokens)  # where the graphs will read
        self._graphs = Graphs(self.segments, self.device, max_rows, max_tokens, cascade=self._cascade)
        self._graphs.capture(progress)
        self.segments.mailbox.restart()

    @property
    def wakeful(self) -> str | None:
        """The reason why this cannot sleep, or None."""
        if self.device.type == "cpu" or self._sleep is not None:
            return None
        return "the weights lie in memory that cannot be given back; start with enable_sleep_mode"

    def sleep(self) -> None:
        """Give the device's memory back: the cache, whose contents are lost, and on a GPU the weights, which go to the
        host. Nothing may run. On a CPU the weights are where they would go."""
        if self._sleep is None:
            forget_pages(self.segments.states.memory.bytes)
        else:
            torch.cuda.synchronize(self.device)
            self._sleep.sleep()
        self._asleep = frozenset(KINDS)

    def wake(self, kinds: Sequence[Kind] = KINDS) -> None:
        """Bring memory of these kinds back."""
        if self._sleep is not None:
            self._sleep.wake(kinds)
            torch.cuda.synchronize(self.device)
        self._asleep -= set(kinds)

    @property
    def awake(self) -> bool:
        return not self._asleep

    @torch.inference_mode()
    def forward(self, plan: StepPlan, given_drafts: Mapping[int, MaskedDrafts] | None = None) -> Forwarded:
        """Apply the plan's deltas, run the network, and score the rows. On a stage of a pipeline that is not the last,
        hand the hidden states on instead. given_drafts: those of rows with masks."""
        self.relay.settle(plan.after)
        self.prepare(plan)
        if given_drafts:
            self._take_drafts(plan.rows, given_drafts)
        drafted = self.proposer is not None and plan.drafts
        wanted = drafts_wanted(plan.rows, self.segments.each - 1) if drafted else 0
        verifies = self.proposer is not None and bool((plan.rows.kinds_R == RowKind.VERIFY).any())
        if verifies and self.cut is not None:
            plan = self.cut.plan(plan)
            verifies = bool((plan.rows.kinds_R == RowKind.VERIFY).any())
        given = self.inserted.given_rows(plan) if self.decoder.spec.embeds else None
        graph = self._graph_of(plan, self._graphs) if self._graphs is not None and given is None else None
        if graph is not None:
            graph.inputs.load(plan)
            inputs, drafts = graph.inputs, graph.drafts
        else:
            inputs, drafts = self.inputs(plan), Drafts.of(plan.rows, self.device) if verifies else None
        catching = None
        if self.proposer is not None:
            catching = self._catching(plan.rows, wanted, given_drafts, graph)
            self._settle(self.proposer, plan.rows, catching)
            if graph is not None and catching is Catching.LATER:
                wanted = 0  # tokens that wait in a graph can catch up between steps alone
        if self.pipe.rank > 0:  # all that may be wrong with a plan was found by now, on all stages
            self.pipe.receive(self.segments.before(plan.num_tokens))
        if graph is not None:
            scores = graph.forward()
        else:
            whole = bool(plan.rows.features & Feature.PROMPT_LOGPROBS) or given is not None
            lengths = HostLengths(
                plan.rows.num_tokens_R, plan.kv_bound_R, whole, plan.rows.kinds_R == RowKind.VERIFY, plan.rows.marks_R
            )  # fmt: skip
            scores = self.segments.forward(inputs, lengths, given, drafts, catching)
        if self.draws:
            return Forwarded(plan, inputs, scores, graph, self._score_prompts(plan, scores.hidden), drafts, wanted)
        if self.pools:
            return Forwarded(plan, inputs, scores, graph, {})
        forwarded, x_TM = Forwarded(plan, inputs, scores, graph, {}), scores.hidden.x_TM[: plan.num_tokens]
        self.pipe.send(x_TM if graph is None else x_TM.clone())
        self.relay.expect(plan, forwarded.rows)
        return forwarded

    def _catching(
        self, rows: Rows, wanted: int, given_drafts: Mapping[int, MaskedDrafts] | None, graph: Graph | None
    ) -> Catching:
        """Return the moment at which a network that drafts runs over the tokens of a step."""
        if graph is not None:
            return self.segments.catching(graph.inputs.tokens_each)
        if wanted == 0 and rows.tokens_each == 1:
            return Catching.LATER
        if wanted == 0 or given_drafts or (rows.kinds_R == RowKind.CHUNK).any():
            return Catching.NOW  # drafts that are given are not those whose keys a draft model has written
        return Catching.BEHIND

    def _settle(self, proposer: Proposer, rows: Rows, catching: Catching) -> None:
        """Let a network that drafts run over tokens that must not wait longer than up to this step."""
        if (backlog := proposer.backlog) is None:
            return
        more_R = rows.num_tokens_R if catching in backlog.takes else None
        if backlog.due(rows.slots_R, more_R):
            proposer.settle(rows.slots_R, self.segments.states)
        if more_R is not None:
            backlog.expect(rows.slots_R, more_R)

    def _take_drafts(self, rows: Rows, given: Mapping[int, MaskedDrafts]) -> None:
        """Let rows verify the drafts that are given, in the place of those that were made on the device."""
        assert self.proposer is not None
        table_SD = self.proposer.drafts_SD
        packed = np.full((len(given), 1 + table_SD.shape[1]), -1, np.int32)  # slot, drafts
        for own, (row, (token_ids_D, _)) in zip(packed, given.items(), strict=True):
            own[0], own[1 : 1 + len(token_ids_D)] = rows.slots_R[row], token_ids_D
        sent = upload(packed, self.device)
        table_SD.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def pool(self, forwarded: Forwarded) -> Vectors:
        """Return the vectors of the rows whose prompts are complete."""
        return pooled(self.decoder, forwarded.plan, forwarded.scores.hidden, self.slots.forms)

    def _graph_of(self, plan: StepPlan, graphs: Graphs) -> Graph | None:
        """Return the graph that a step replays, or None if it runs op by op. Ranks that exchange tokens replay the same
        one, whatever their own plans need."""
        return graphs.find(plan) if self.decoder.mesh.exchange is None else self._round

    def expect_round(self, shape: Shape, captured: bool) -> None:
        """Let the next step exchange tokens with other ranks, none of which has more rows or tokens than `shape`."""
        exchange = self.decoder.mesh.exchange
        assert exchange is not None
        self._round = self._graphs.holding(shape) if self._graphs is not None and captured else None
        exchange.capacity = shape.tokens if self._round is None else self._round.inputs.num_tokens

    @torch.inference_mode()
    def lend_experts(self) -> None:
        """Take part in a step of other ranks, in which this one has no tokens."""
        if self._round is None:
            self.decoder.lend_experts()
            return
        self._round.inputs.load_padding()
        self._round.forward()

    def prepare(self, plan: StepPlan) -> None:
        """Bring the slots and the blocks to the state that the plan starts from."""
        if plan.reset:
            self.slots.reset()
        self.slots.apply(plan.deltas)
        if plan.copies:
            self.segments.states.copy(plan.copies)
        if plan.expected is not None:
            self.slots.check(plan.expected)
        self._check_generations(plan)
        if self.proposer is not None:
            self.proposer.assign(plan.deltas)
        elif plan.rows.num_logits_R.max() > 1:
            raise ContractViolation(
                f"a row may emit {plan.rows.num_logits_R.max()} tokens; this worker verifies no drafts, so a row emits "
                "one."
            )

    def inputs(self, plan: StepPlan) -> DeviceInputs:
        """Return the plan's rows on the device, for a step that runs op by op."""
        if self._inputs is None or not self._inputs.holds(plan):
            rows = plan.rows
            exact = Shape(len(rows), plan.num_tokens, rows.tokens_each)
            padded = self._graphs is not None and not (rows.kinds_R == RowKind.VERIFY).any()
            shape = self._graphs.uncaptured(plan) if self._graphs is not None and padded else exact
            shared = self._cascade and self._graphs is None and bool(rows.prefixes)
            self._inputs = self.segments.inputs(shape, self.device, plan, cascade=shared)
        return self._inputs

    @torch.inference_mode()
    def sample(
        self,
        forwarded: Forwarded,
        masks: Mapping[int, np.ndarray],
        given_drafts: Mapping[int, MaskedDrafts] | None = None,
    ) -> Sampled:
        """Draw a token for every sampling row, or behind each of its drafts, and advance the slots."""
        plan, features, scores = forwarded.plan, forwarded.plan.rows.features, forwarded.scores
        drafts = forwarded.drafts
        vocabulary = self.segments.vocabulary
        guides = self._guides(plan.rows, forwarded.inputs.num_rows) if plan.rows.guided else None
        if guides is not None:
            scores = replace(scores, logits_RU=guides.scores(scores.logits_RU, vocabulary))
        reported_RU = scores.logits_RU  # logprobs are taken from the scores before masks
        if drafts is None:
            reported_RU = reported_RU[: len(plan.rows)]
        if masks:
            if features & Feature.LOGPROBS:
                reported_RU = reported_RU.clone()
            by_place = masks if drafts is None else _by_place(masks, given_drafts or {}, drafts.known_RN)
            self.segments.mask(scores, Masks.of(vocabulary.own_bits(by_place), vocabulary.each, self.device))
        outcome = forwarded.graph.sample(features) if forwarded.graph is not None and guides is None else None
        if outcome is None:
            outcome = self.segments.sample(forwarded.inputs, scores, features, guides, drafts, forwarded.wanted)
        if self.pipe.size > 1 and plan.rows.num_logits_R.any():
            self.pipe.tell(outcome.token_R[: len(plan.rows)].clone())
        letter = self.segments.mailbox.expect(outcome.packed)
        logprobs = None
        apart: dict[int, DeviceLogprobs] = {}
        if features & Feature.LOGPROBS:
            token_RK = outcome.token_RK[: len(plan.rows)].long().clamp(min=0)
            places_Q = None if drafts is None else drafts.drawn_at(outcome.path_RK)[: len(plan.rows)].flatten()
            scored_QU = reported_RU if places_Q is None else reported_RU[places_Q]
            logprobs = vocabulary.score(scored_QU, token_RK.flatten(), plan.rows.num_logprobs)
            apart = self._score_apart(plan, reported_RU, token_RK[:, 0]) if features & Feature.APART else apart
        return Sampled(forwarded, outcome, letter, logprobs, apart)

    def _score_apart(self, plan: StepPlan, scores_RU: Tensor, token_R: Tensor) -> dict[int, DeviceLogprobs]:
        """Score the rows whose logprobs have no place beside those of others, one by one."""
        found = {}
        for row in plan.rows.num_logits_R.nonzero()[0].tolist():
            params = self.slots.forms[int(plan.rows.slots_R[row])].params
            if not reports_apart(params):
                continue
            one_1U, token_1 = scores_RU[row : row + 1], token_R[row : row + 1]
            found[row] = self.segments.vocabulary.score(
                one_1U, token_1, (params.logprobs or 0) if params.logprob_token_ids is None else 0
            )
            if params.logprob_token_ids is not None:
                ids_1L = upload(np.array([params.logprob_token_ids], np.int64), self.device)
                named = self.segments.vocabulary.named(one_1U, ids_1L)
                found[row] = replace(found[row], top_ids_RL=ids_1L, top_logprobs_RL=named)
        return found

    def _check_generations(self, plan: StepPlan) -> None:
        rows = plan.rows
        held_R = self.slots.generations[rows.slots_R]
        for row in np.flatnonzero(held_R != rows.generations_R):
            raise ContractViolation(
                f"plan {plan.id} names slot {rows.slots_R[row]} generation {rows.generations_R[row]}; "
                f"the worker holds generation {held_R[row]}."
            )

    def _guides(self, rows: Rows, num_rows: int) -> Guides:
        if self._guided is None or self._guided[0] is not rows or self._guided[1] != num_rows:
            self._guided = rows, num_rows, Guides(rows, num_rows, self.device)
        return self._guided[2]

    def _score_prompts(self, plan: StepPlan, hidden: Hidden) -> dict[int, DeviceLogprobs]:
        if not plan.rows.features & Feature.PROMPT_LOGPROBS:
            return {}
        scored = {span.row: self._score_prompt(plan, span.row, hidden) for span in plan.spans}
        return {row: scores for row, scores in scored.items() if scores is not None}

    def _score_prompt(self, plan: StepPlan, row: int, hidden: Hidden) -> DeviceLogprobs | None:
        """Score the prompt tokens that this chunk's positions predict. The last known token predicts none of them."""
        form = self.slots.forms[int(plan.rows.slots_R[row])]
        count = int(plan.rows.num_tokens_R[row])
        end = int(plan.kv_bound_R[row]) + 1
        first = max(end - count, form.params.scored_from or end)
        next_ids = form.prompt[first:end]
        if form.params.prompt_logprobs is None or not next_ids:
            return None
        start = int(plan.rows.num_tokens_R[:row].sum()) + first - (end - count)
        pieces = []
        for offset in range(0, len(next_ids), SCORED_AT_ONCE):
            ids = next_ids[offset : offset + SCORED_AT_ONCE]
            logits_TU = self.decoder.own_logits(hidden.at(slice(start + offset, start + offset + len(ids))))
            token_T = upload(np.array(ids, np.int64), self.device)
            pieces.append(self.segments.vocabulary.score(logits_TU, token_T, form.params.prompt_logprobs))
        return DeviceLogprobs.joined(pieces)


def _by_place(
    masks: Mapping[int, np.ndarray], given: Mapping[int, MaskedDrafts], places_RN: np.ndarray
) -> dict[int, np.ndarray]:
    """Return the masks by the position that each is for: behind a row's last token, and behind its drafts."""
    found = {int(places_RN[row, 0]): bits_W for row, bits_W in masks.items()}
    for row, (_, bits_DW) in given.items():
        found |= zip(places_RN[row, 1 : 1 + len(bits_DW)].tolist(), bits_DW, strict=True)
    return found
