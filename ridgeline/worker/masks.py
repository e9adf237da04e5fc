"""The token masks of a step on the device: the bits of the masked rows, and the indices of these rows.

Legend:
    R  rows of the step
    V  vocabulary
    U  masked rows
    W  words of 32 bits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature, MaskedDrafts
from ridgeline.core.plan.token_bits import num_words
from ridgeline.kernels.ops import Ops
from ridgeline.worker.step import DeviceStep, PlannedStep, StepPart
from ridgeline.worker.upload import staging
from ridgeline.worker.vocabulary import Vocabulary

ALIGNMENT = 4  # words; the bits begin at a multiple of 16 bytes, as kernels expect of a tensor


class Masking(StepPart):
    """Forbids tokens in the scores, in place, before tokens are drawn."""

    features = Feature.MASK

    def __init__(self, ops: Ops, vocabulary: Vocabulary, device: torch.device) -> None:
        self._ops, self._vocabulary, self._device = ops, vocabulary, device

    def before_sample(self, step: PlannedStep) -> None:
        if step.masks:
            drafts = step.device.drafts
            by_place = step.masks if drafts is None else _by_place(step.masks, step.given_drafts, drafts.known_RN)
            bits = self._vocabulary.own_bits(by_place)
            masks = Masks.of(bits, self._vocabulary.each, self._device)
            self._ops.mask_logits(step.device.logits_RU, masks.bits_UW, masks.row_U)

    def rehearse(self, step: DeviceStep) -> None:
        """Forbid nothing, so that the kernel is compiled early."""
        masks = Masks.none(step.logits_RU)
        self._ops.mask_logits(step.logits_RU, masks.bits_UW, masks.row_U)


def _by_place(
    masks: Mapping[int, np.ndarray], given: Mapping[int, MaskedDrafts], places_RN: np.ndarray
) -> dict[int, np.ndarray]:
    """Return the masks by the position that each is for: behind a row's last token, and behind its drafts."""
    found = {int(places_RN[row, 0]): bits_W for row, bits_W in masks.items()}
    for row, (_, bits_DW) in given.items():
        found |= zip(places_RN[row, 1 : 1 + len(bits_DW)].tolist(), bits_DW, strict=True)
    return found


class Masks(NamedTuple):
    """The masks of some rows.

    bits_UW: int32; token v may come if bit v % 32 of word v // 32 is set.
    row_U: int32, the row of each mask.
    """

    bits_UW: Tensor
    row_U: Tensor

    @staticmethod
    def of(masks: Mapping[int, np.ndarray], vocab_size: int, device: torch.device) -> Masks:
        """Upload `masks` (row → packed bits) in one copy for which the host does not wait."""
        count, words = len(masks), num_words(vocab_size)
        first = -(-count // ALIGNMENT) * ALIGNMENT
        staged = staging(first + count * words, device)
        packed = staged.numpy()
        packed[:count] = list(masks)
        np.stack(list(masks.values()), out=packed[first:].view(np.uint32).reshape(count, words))
        sent = staged.to(device, non_blocking=True)
        return Masks(sent[first:].view(count, words), sent[:count])

    @staticmethod
    def none(logits_RV: Tensor) -> Masks:
        """Return a mask of the first row that forbids nothing. It serves to run the kernel before it is needed."""
        device = logits_RV.device
        bits_UW = torch.full((1, num_words(logits_RV.shape[1])), -1, dtype=torch.int32, device=device)
        return Masks(bits_UW, torch.zeros(1, dtype=torch.int32, device=device))
