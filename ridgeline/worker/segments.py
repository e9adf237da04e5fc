"""The two segments of a step on the device: forward (tokens in, scores out) and sample (scores in, tokens out, slots
advanced). Token masks are applied between them. Both are what the parts of a step do there, one after the other."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.plan.buckets import MIXED_TOKENS
from ridgeline.core.plan.step import StepPlan
from ridgeline.core.settings.speculation import verified_widths
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.adapters.part import StepOfAdapters
from ridgeline.worker.divided import DividedNetwork
from ridgeline.worker.drawing import Drawing
from ridgeline.worker.given import GivenInputs, parts_of_vector
from ridgeline.worker.inputs import DeviceInputs, Shape
from ridgeline.worker.mailbox import Mailbox
from ridgeline.worker.masks import Masking
from ridgeline.worker.network import ModelNetwork, StageNetwork
from ridgeline.worker.pooling import Pooling
from ridgeline.worker.relay import HandingOn, Relay
from ridgeline.worker.sleep import SleepMemory
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.drafted import DraftedNetwork, VerifiedDraws
from ridgeline.worker.speculation.proposer import Proposer
from ridgeline.worker.state.states import States
from ridgeline.worker.step import DeviceStep, Ending, Outcome, StepPart, moment
from ridgeline.worker.vocabulary import Vocabulary


class Segments:
    """The parts of a step that work on the device: its network and its ending, chosen by the model, the ranks and the
    settings, and the mailbox.

    divide_from: the tokens of a step from which on the ranks of `mesh.cp` divide them.
    proposer: makes the drafts that rows verify; None: they verify none.

    widths: drafts of a row, where all rows of a step verify as many.
    columns: tokens that a row emits, at most.
    adapts: rows may have adapters.
    given: what graphs read of vectors and positions that are given; None: nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout,
        slots: Slots,
        relay: Relay,
        divide_from: int | None = None,
        sleep: SleepMemory | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        ops, device = decoder.ops, slots.device
        self.decoder, self.slots, self.proposer, self._ops = decoder, slots, proposer, ops
        self.widths: tuple[int, ...] = ()
        if proposer is not None:
            self.widths = verified_widths(proposer.drafts_SD.shape[1], whole=proposer.tree_SN is not None)
        self.columns = 1 if proposer is None else 1 + proposer.depth
        layers = decoder.spec.layers + (() if proposer is None else proposer.layers)
        model = replace(decoder.spec, layers=layers)
        self.states = States(layout, model, decoder.dtype, device, ops, decoder.mesh.cp, sleep)
        self.vocabulary = Vocabulary(decoder.spec.vocab_size, decoder.tp, ops)
        self.mailbox = Mailbox(Outcome.empty(slots.dummy, device, self.columns).packed.nbytes, ops, device)
        self.masking = Masking(ops, self.vocabulary, device)
        self.network = self._network(divide_from)
        self.ending = self._ending(relay)
        self.adapts = False
        self.given: GivenInputs | None = None
        parts: list[StepPart] = [self.network, self.ending, *([self.mailbox] if self.ending.draws else [])]
        self._forward = [act for _, act in moment(parts, "forward")]
        self._sample = [act for _, act in moment(parts, "sample")]

    def take_given(self, max_tokens: int) -> None:
        """Let graphs of steps of up to so many tokens take vectors and positions that are given, if the model makes
        such. Call it before there are graphs."""
        axes, tokens = self.network.axes is not None, min(max_tokens, MIXED_TOKENS[-1])
        if parts_of_vector(self.decoder.spec) or axes:
            self.given = GivenInputs(self.decoder.spec, tokens, self.decoder.dtype, self.slots.device, axes=axes)

    def adapt(self, part: StepOfAdapters) -> None:
        """Let steps have adapters. Drafts are made without them."""
        self._forward = [part.forward, *self._forward, part.leave]
        self.adapts = True
        if isinstance(self.network, DraftedNetwork):
            self.network.aside = part.aside
        if isinstance(self.network, DividedNetwork):
            self.network.some = part.tables.some

    def _network(self, divide_from: int | None) -> ModelNetwork:
        parts = self.decoder, self._ops, self.slots, self.states
        if self.proposer is not None:
            return DraftedNetwork(*parts, self.proposer)
        if divide_from is not None:
            return DividedNetwork(*parts, divide_from)
        return ModelNetwork(*parts) if self.decoder.spec.embeds else StageNetwork(*parts)

    def _ending(self, relay: Relay) -> Ending:
        decoder, ops, slots = self.decoder, self._ops, self.slots
        if decoder.spec.pooling is not None:
            return Pooling(decoder, ops, slots)
        if not decoder.spec.scores:
            return HandingOn(decoder, ops, slots, relay)
        if self.proposer is None:
            return Drawing(decoder, ops, slots, self.vocabulary, self.mailbox)
        return VerifiedDraws(decoder, ops, slots, self.vocabulary, self.mailbox, self.proposer, self.states)

    def inputs(self, shape: Shape, plan: StepPlan | None = None, *, cascade: bool = False) -> DeviceInputs:
        """Return inputs for a step of this shape. cascade: they name the rows that share their first blocks."""
        return DeviceInputs(shape, self.slots.dummy, self.slots.device, plan, cascade=cascade)

    def forward(self, step: DeviceStep) -> None:
        """Run the network, and score what tokens are drawn from."""
        for forward in self._forward:
            forward(step)

    def sample(self, step: DeviceStep) -> None:
        """Draw tokens, advance the slots, make drafts, and post the outcome."""
        for sample in self._sample:
            sample(step)
