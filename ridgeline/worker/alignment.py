"""The attention of a prompt's tokens to a sound, from which the times of words are told.

Each head's weights are standardised over the tokens and smoothed over the frames, and the heads' mean is reported, as
in Whisper's own code (`timing.py` of openai/whisper).

Legend:
    T  tokens whose attention is reported
    F  frames of the encoder's output
    H  query heads
    G  key/value heads
    D  head width
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ridgeline.core.plan.sounds import AlignedTokens
from ridgeline.core.plan.step import Feature
from ridgeline.layers.cross_attention import CrossAttention
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.cross import CrossLayer
from ridgeline.worker.state.states import States
from ridgeline.worker.step import PlannedStep, StepPart

SMOOTHED = 7  # frames of which the median is taken


@dataclass
class AlignedRow:
    """A row of the step. start: its first aligned token among the step's. length: frames of its sound. heads: by
    layer."""

    slot: int
    start: int
    length: int
    asked: AlignedTokens
    heads: dict[int, list[int]]
    sum_TF: Tensor

    def add(self, layer: CrossLayer, heads: list[int], q_THD: Tensor, scale: float) -> None:
        """Add the smoothed weights of a layer's heads. They run one by one, since a head's frames lie seven times in
        memory."""
        k_GFD = layer.keys(self.slot, self.length)
        own_THD, per = q_THD[self.start : self.start + self.asked.tokens].float(), q_THD.shape[1] // len(k_GFD)
        for head in heads:
            weight_TF = (own_THD[:, head] @ k_GFD[head // per].T * scale).softmax(1)[:, : self.asked.frames]
            self.sum_TF += smoothed(standardised(weight_TF))


class Alignment(StepPart):
    """The part that watches cross attention for rows with `SpeechRules.aligned`. Their steps run op by op.

    It is asked in every step, since one that failed may have left its watches.
    """

    def __init__(self, decoder: Decoder, slots: Slots, states: States) -> None:
        mixers = [(n, layer.mixer) for n, layer in enumerate(decoder.layers)]
        own = [(states[n], mixer.spec.num_heads) for n, mixer in mixers if isinstance(mixer, CrossAttention)]
        self._layers: list[CrossLayer] = [layer for layer, _ in own]
        self._heads = [count for _, count in own]
        self._slots, self._rows = slots, dict[int, AlignedRow]()

    def prepare(self, step: PlannedStep) -> None:
        if self._rows:
            self._forget()
        if not step.plan.rows.features & Feature.SPEECH:
            return
        rows, device = step.plan.rows, self._slots.device
        for span in step.plan.spans:
            slot = int(rows.slots_R[span.row])
            rules = self._slots.forms[slot].speech
            if rules is None or rules.aligned is None or not span.encoded:
                continue
            asked, length = rules.aligned, len(span.encoded)
            sum_TF = torch.zeros(asked.tokens, min(asked.frames, length), device=device)
            start = int(rows.num_tokens_R[: span.row + 1].sum()) - asked.tokens
            self._rows[span.row] = AlignedRow(slot, start, length, asked, self._chosen(asked), sum_TF)
        for index, layer in enumerate(self._layers if self._rows else ()):
            layer.watch = partial(self._watch, index)
        step.watched = bool(self._rows)

    def after_forward(self, step: PlannedStep) -> None:
        if self._rows:
            for row, each in self._rows.items():
                step.aligned[row] = each.sum_TF / max(sum(map(len, each.heads.values())), 1)
            self._forget()

    def _watch(self, index: int, q_THD: Tensor, scale: float) -> None:
        for row in self._rows.values():
            if index in row.heads:
                row.add(self._layers[index], row.heads[index], q_THD, scale)

    def _chosen(self, asked: AlignedTokens) -> dict[int, list[int]]:
        """Return the heads by layer. A model's files may name some that it has not."""
        found: dict[int, list[int]] = {}
        for layer, head in asked.heads:
            if layer < len(self._heads) and head < self._heads[layer]:
                found.setdefault(layer, []).append(head)
        upper = range(len(self._heads) // 2, len(self._heads))
        return found or {layer: [*range(self._heads[layer])] for layer in upper}

    def _forget(self) -> None:
        self._rows.clear()
        for layer in self._layers:
            layer.watch = None


def standardised(weight_TF: Tensor) -> Tensor:
    """Return each frame's weights with a mean of 0 and a deviation of 1 over the tokens; 0 where all are equal."""
    deviation_F = weight_TF.std(0, unbiased=False)
    return ((weight_TF - weight_TF.mean(0)) / deviation_F).masked_fill(deviation_F == 0, 0)


def smoothed(x_TF: Tensor) -> Tensor:
    """Return the median of SMOOTHED frames around each, which are mirrored at the ends."""
    side = SMOOTHED // 2
    if x_TF.shape[1] <= side:
        return x_TF
    padded_TF = torch.nn.functional.pad(x_TF, (side, side), mode="reflect")
    return padded_TF.unfold(1, SMOOTHED, 1).median(2).values
