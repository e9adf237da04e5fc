"""Token masks of a step as the device wants them: the bits of those rows that have one, and which rows these are.

Legend: R rows of the step, V vocabulary, M masked rows, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.token_bits import num_words
from ridgeline.worker.upload import staging

ALIGNMENT = 4  # words: the bits begin at a multiple of 16 bytes, as a kernel compiled for tensors expects


class Masks(NamedTuple):
    """bits_MW int32: token v may come if bit v % 32 of word v // 32 is set. row_M int32: whose they are."""

    bits_MW: Tensor
    row_M: Tensor

    @staticmethod
    def of(masks: Mapping[int, np.ndarray], vocab_size: int, device: torch.device) -> Masks:
        """Row → packed bits, on the device in one copy that nobody waits for."""
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
        """One that forbids nothing, for the first row: to run the kernel before it is needed."""
        device = logits_RV.device
        bits_MW = torch.full((1, num_words(logits_RV.shape[1])), -1, dtype=torch.int32, device=device)
        return Masks(bits_MW, torch.zeros(1, dtype=torch.int32, device=device))
