"""The encoder of a model that has one: it runs whole, before a request's first row, and leaves keys and values for the
decoder's cross attention.

Legend:
    T  tokens of the encoder inputs of a step, packed behind one another
    N  windows of sound
    M  model width
    S  slots
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.sounds import Waveform
from ridgeline.core.plan.step import Span
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.cross_attention import crossing
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.cross import CrossKV
from ridgeline.worker.state.packed import PackedLayer
from ridgeline.worker.state.states import States
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import upload, upload_sounds


class EncoderStates:
    """The states of an encoder's layers, a `layers.decoder.LayerStates`: nothing is kept of any."""

    live_T = None

    def __init__(self, packed: PackedLayer) -> None:
        self._packed = packed

    def __getitem__(self, layer: int) -> PackedLayer:
        return self._packed


class EncoderPart(StepPart):
    """The part that runs the encoder over the inputs that a plan's spans bring. It sizes its work on the host, so it is
    never in a graph. adapters: those that rows may have."""

    adapters: AdapterTables | None = None

    def __init__(self, decoder: Decoder, slots: Slots, states: States) -> None:
        if decoder.encoder is None:
            raise ContractViolation("this model has no encoder.")
        self._encoder, self._slots, self._states = decoder.encoder, slots, states
        self._packed = PackedLayer(decoder.ops)
        self._layers = crossing(decoder.layers)
        self._groups = [(g, group) for g, group in enumerate(states.groups) if isinstance(group, CrossKV)]
        self._length_S = torch.ones(len(slots.kv_len_S), dtype=torch.int32, device=slots.device)
        for _, group in self._groups:
            group.length_S = self._length_S

    def prepare(self, step: PlannedStep) -> None:
        """Run the encoder, and store what the decoder's layers make of its output."""
        spans = [span for span in step.plan.spans if span.encoded]
        if not spans:
            return
        rows, device = step.plan.rows, self._slots.device
        ends = np.array([(rows.slots_R[span.row], len(span.encoded)) for span in spans], np.int64).T
        slot_S, length_S = upload(np.ascontiguousarray(ends), device)
        self._length_S[slot_S] = length_S.int()
        if spans := [span for span in spans if not span.heard]:
            self._encode(step, spans)

    def rehearse(self, tokens: int) -> None:
        """Run the encoder over inputs of so many tokens together, which are stored in the first slot."""
        longest = min(self._encoder.spec.max_position_embeddings, tokens)
        lengths = np.full(tokens // longest, longest)
        samples_NS, device = None, self._slots.device
        if (stem := self._encoder.stem) is not None:
            samples_NS = torch.zeros(len(lengths), stem.spec.samples, device=device)
        position_T = torch.arange(longest, device=device).repeat(len(lengths))
        slot_T = torch.zeros_like(position_T)
        self._stored((slot_T, position_T, slot_T), lengths, samples_NS)

    def _encode(self, step: PlannedStep, spans: Sequence[Span]) -> None:
        slots, device = step.plan.rows.slots_R[[span.row for span in spans]], self._slots.device
        lengths = np.array([len(span.encoded) for span in spans])
        tokens = np.concatenate([span.encoded for span in spans])
        positions = np.concatenate([np.arange(length) for length in lengths])
        sent = upload(np.stack((tokens, positions, np.repeat(slots, lengths))), device)
        sounds = [span.sound for span in spans if span.sound is not None]
        samples_NS = self._samples(sounds) if sounds else None
        places = [self._slots.forms[int(slot)].adapter for slot in slots]
        with nullcontext() if self.adapters is None else self.adapters.encoding(places, lengths.tolist()):
            self._stored(sent.unbind(), lengths, samples_NS)

    def _stored(self, inputs: Sequence[Tensor], lengths: np.ndarray, samples_NS: Tensor | None) -> None:
        """Encode inputs, and store what the decoder's layers make of them.

        inputs: tokens, positions and slots, [T] each. samples_NS: of sounds, in place of tokens.
        """
        token_T, position_T, slot_T = inputs
        stem, x_TM = self._encoder.stem, None
        if samples_NS is not None and stem is not None:
            x_TM = stem(samples_NS)
        encoded_TM = self._encoded(token_T, position_T, lengths, x_TM)
        for g, group in self._groups:
            group.place(slot_T, position_T, self._slots.block_tables_ASC[g])
        for index, mixer in self._layers:
            mixer.encode(encoded_TM, self._states[index])

    def _samples(self, sounds: Sequence[Waveform]) -> Tensor:
        """Return sounds on the device, with silence behind each: [N, samples of a window]."""
        stem = self._encoder.stem
        assert stem is not None
        return upload_sounds([sound.samples.data for sound in sounds], stem.spec.samples, self._slots.device)

    def _encoded(self, token_T: Tensor, position_T: Tensor, lengths: np.ndarray, x_TM: Tensor | None) -> Tensor:
        """Return the encoder's output: [T, M]. x_TM: what the first layer reads, if that is not made of tokens."""
        self._packed.rows = PackedRows.of(lengths)
        return self._encoder.normed(self._encoder(token_T, position_T, EncoderStates(self._packed), x_TM))
