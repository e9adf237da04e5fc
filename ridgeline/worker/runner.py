"""Executes plans on one device, in their order: each goes through the parts of a step.

Token masks may arrive between the two segments. Steps that fit a captured graph replay it. The others (long prompts,
rare sampling features, CPUs) run the same segments op by op.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ridgeline.core.plan.step import Feature, MaskedDrafts, StepPlan
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.host_layout import HostLayout
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.adapters.part import StepOfAdapters
from ridgeline.worker.adapters.store import AdapterStore
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.alignment import Alignment
from ridgeline.worker.changes import SlotChanges
from ridgeline.worker.crossing import PicturesSeen
from ridgeline.worker.embeds import InsertedVectors
from ridgeline.worker.encoding import EncoderPart
from ridgeline.worker.graphs import Graphs, Progress
from ridgeline.worker.guidance import Guidance
from ridgeline.worker.host_memory import HostMemory
from ridgeline.worker.launch import Launch, RoundLaunch
from ridgeline.worker.logprobs import PromptLogprobs, TokenLogprobs
from ridgeline.worker.moving import Mover
from ridgeline.worker.pooling import Pooling
from ridgeline.worker.received import ReceivedWeights
from ridgeline.worker.relay import Relay, SentTokens
from ridgeline.worker.saturation import Saturation
from ridgeline.worker.segments import Segments
from ridgeline.worker.sleep import DeviceSleep, SleepMemory
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.drafted import DraftedRows
from ridgeline.worker.speculation.methods import DraftSource, proposer_of
from ridgeline.worker.speculation.proposer import Proposer
from ridgeline.worker.speech import SpeechScores
from ridgeline.worker.step import PlannedStep, StepPart, moment
from ridgeline.worker.tallies import Tallies
from ridgeline.worker.tower_graphs import TowerGraphs


class Runner:
    """The model, its state and its graphs on one device.

    cascade: in decode steps attention lets rows of a prefix group read their common blocks together.
    divide_from: as in `Segments`.
    sleep: the memory of weights and cache, if it may be given back while the engine sleeps.
    drafts: where the drafts come from that rows verify; None: they verify none.

    draws: True unless a later stage of a pipeline draws the tokens, or the model pools.
    drafted: the part that says which drafts rows verify; None: they verify none.
    encoding: the part that runs the encoder; None: the model has none.
    host: the part that moves blocks to the host's memory and back; None: they stay on the device.
    adapters: the part that brings adapters to the device; None: requests have none.
    received: the weights, as a trainer may send others; None: their names are not known.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout,
        *,
        num_slots: int,
        max_model_len: int,
        cascade: bool = False,
        divide_from: int | None = None,
        sleep: SleepMemory | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        self.decoder = decoder
        self.device = next(decoder.parameters()).device
        # A multiple of 16, for which Triton specializes kernels: so every length runs the same kernels
        ahead = 0 if drafts is None else drafts.ahead
        longest = max_model_len + ahead
        if decoder.encoder is not None:
            longest = max(longest, decoder.encoder.spec.max_position_embeddings)
        longest = max(longest, decoder.spec.most_crossed)
        columns = -(-longest // (16 * layout.block_size)) * 16
        pools = decoder.spec.pooling is not None
        vocabulary = 1 if pools else decoder.spec.vocab_size  # of the tables by which tokens are drawn
        self.slots = Slots(num_slots, len(layout.groups), columns, vocabulary, self.device)
        self.proposer: Proposer | None = None
        if drafts is not None:
            sizes = {"max_model_len": max_model_len, "block_size": layout.block_size}
            self.proposer = proposer_of(drafts, decoder, self.slots, **sizes)
        self.tallies, self.saturation = Tallies(decoder), Saturation(decoder)
        self.mover, self.inserted = Mover(decoder), InsertedVectors(decoder, self.device)
        self.relay = Relay(decoder.mesh.pp, self.slots, decoder.ops)
        self.segments = Segments(decoder, layout, self.slots, self.relay, divide_from, sleep, self.proposer)
        self.rest, self._sleep = DeviceSleep(self.segments.states.memory.bytes, sleep), sleep
        self.ending, self.draws = self.segments.ending, self.segments.ending.draws
        self.drafted: DraftedRows | None = None
        if self.proposer is not None:
            self.drafted = DraftedRows(self.proposer, max(self.segments.widths, default=0), self.device)
        exchange = decoder.mesh.exchange
        self.launch = Launch(self.segments, cascade=cascade)
        if exchange is not None:
            self.launch = RoundLaunch(self.segments, decoder, exchange, cascade=cascade)
        self.encoding: EncoderPart | None = None
        self.prompts: PromptLogprobs | None = None
        parts = self._parts()
        self.host: HostMemory | None = None
        self.adapters: StepOfAdapters | None = None
        self.received: ReceivedWeights | None = None
        self._prepare, self._after_forward = moment(parts, "prepare"), moment(parts, "after_forward")
        self._before_sample, self._after_sample = moment(parts, "before_sample"), moment(parts, "after_sample")

    def _parts(self) -> list[StepPart]:
        """Return the parts that every step of this runner goes through, in their order."""
        decoder, segments, vocabulary, device = self.decoder, self.segments, self.segments.vocabulary, self.device
        piped = decoder.mesh.pp.size > 1
        parts: list[StepPart] = [self.relay] if piped else []
        parts.append(SlotChanges(self.slots, segments.states, segments.columns))
        if self.drafted is not None:
            parts.append(self.drafted)
        if decoder.spec.embeds or decoder.spec.tower is not None:  # later stages take in the places of tokens
            parts.append(self.inserted)
        if decoder.encoder is not None:
            self.encoding = EncoderPart(decoder, self.slots, segments.states)
            parts.append(self.encoding)
            if decoder.encoder.stem is not None:
                parts.append(Alignment(decoder, self.slots, segments.states))
        if decoder.spec.crosses:
            assert self.inserted.pictures is not None
            size = segments.states.memory.layout.block_size
            parts.append(PicturesSeen(decoder, self.slots, segments.states, self.inserted.pictures, size))
        parts += [self.launch, segments.network, segments.ending]
        if self.draws:
            self.prompts = PromptLogprobs(decoder, self.slots, vocabulary)
            parts += [
                self.prompts,
                *([SentTokens(decoder.mesh.pp)] if piped else []),
            ]
            parts += [segments.mailbox, Guidance(vocabulary, device)]
            if decoder.encoder is not None and decoder.encoder.stem is not None:
                parts.append(SpeechScores(decoder.ops, self.slots, vocabulary))
            parts += [TokenLogprobs(self.slots, vocabulary), segments.masking]
        return parts

    def keep_below(self, layout: HostLayout, staged: int, *, shared: bool = False) -> None:
        """Take memory of the host for blocks that the cache has no room for, and `staged` bytes of the device's for
        those on their way. shared: with the leader of several ranks. Raise InvalidConfig if there is none."""
        self.host = HostMemory(self.segments.states.memory, layout, staged, shared=shared)
        self._prepare = moment([self.host], "prepare") + self._prepare

    def adapt(self, store: AdapterStore, tables: AdapterTables) -> None:
        """Let requests run with adapters."""
        heads = self.ending.heads if isinstance(self.ending, Pooling) else None
        self.adapters = StepOfAdapters(store, tables, self.slots, heads)
        self.inserted.adapters = self.ending.adapters = tables
        for part in self.prompts, self.encoding:
            if part is not None:
                part.adapters = tables
        self._prepare = moment([self.adapters], "prepare") + self._prepare
        self.segments.adapt(self.adapters)

    def capture(self, *, max_rows: int, max_tokens: int, progress: Progress | None = None, later: bool = False) -> None:
        """Capture graphs for steps of up to `max_rows` rows and `max_tokens` tokens (the largest steps are not
        captured). CUDA only. later: capture them behind steps that need them, and in `prepare_later_steps`."""
        self.segments.take_given(max_tokens)
        sizes = self.segments, max_rows, max_tokens
        self.launch.graphs = Graphs(*sizes, cascade=self.launch.cascade, sleep=self._sleep)
        pictures = self.inserted.pictures
        if later:
            self.launch.graphs.capture_later()
            if pictures is not None:
                pictures.capture(self.launch.graphs.pool, later=True)
            return
        try:
            self.launch.graphs.capture(progress)
            if pictures is not None:
                pictures.capture(self.launch.graphs.pool, later=False)
        except BaseException:
            self.launch.graphs = None
            raise
        finally:
            self.segments.mailbox.restart()

    def sleep(self) -> None:
        """Give the device's memory back, as `DeviceSleep.sleep`, and let go of the vectors of pictures."""
        self.inserted.stored.clear()
        self.rest.sleep()

    @property
    def pieces_left(self) -> int:
        """The number of pieces of work that are left for moments without a request."""
        steps, towers = self.launch.graphs, self._tower_graphs
        return (0 if steps is None else steps.left) + (0 if towers is None else towers.left)

    @property
    def _tower_graphs(self) -> TowerGraphs | None:
        return None if self.inserted.pictures is None else self.inserted.pictures.graphs

    def prepare_later_steps(self) -> None:
        """Do one of these pieces. No step may be between its segments."""
        steps, towers = self.launch.graphs, self._tower_graphs
        if steps is not None and steps.left:
            steps.rest()
            self.segments.mailbox.go_on()
        elif towers is not None:
            towers.rest()

    def capture_behind(self) -> None:
        """Capture the bucket in which the last step ran op by op, if it did, and that of its tower. No step may be
        between its segments."""
        graph, self.launch.missed = self.launch.missed, None
        if graph is not None and self.launch.graphs is not None:
            self.launch.graphs.capture_one(graph)
            self.segments.mailbox.go_on()
        self.inserted.missed = False
        if (towers := self._tower_graphs) is not None:
            towers.capture_behind()

    @torch.inference_mode()
    def forward(self, plan: StepPlan, given_drafts: Mapping[int, MaskedDrafts] | None = None) -> PlannedStep:
        """Apply the plan's deltas, run the network, and score the rows. On a stage of a pipeline that is not the last,
        hand the hidden states on instead. given_drafts: those of rows with masks."""
        step, features = PlannedStep(plan, given_drafts or {}), int(plan.rows.features)
        for needed, prepare in self._prepare:
            if not needed or needed & features:
                prepare(step)
        if step.graph is not None:
            step.graph.forward(step.device)
        else:
            self.segments.forward(step.device)
        for needed, follow in self._after_forward:
            if not needed or needed & features:
                follow(step)
        return step

    @torch.inference_mode()
    def sample(
        self,
        step: PlannedStep,
        masks: Mapping[int, np.ndarray] | None = None,
        given_drafts: Mapping[int, MaskedDrafts] | None = None,
    ) -> PlannedStep:
        """Draw a token for every sampling row, or behind each of its drafts, and advance the slots."""
        device, features = step.device, int(step.plan.rows.features)
        step.masks, step.given_drafts, device.features = masks or {}, given_drafts or {}, Feature(features)
        for needed, prepare in self._before_sample:
            if not needed or needed & features:
                prepare(step)
        if step.graph is None or device.giver_R is not None or not step.graph.sample(device):
            self.segments.sample(device)
        for needed, follow in self._after_sample:
            if not needed or needed & features:
                follow(step)
        return step
