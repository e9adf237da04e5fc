"""Prompt lookup: what a text ends with stood in it before, so what followed then may follow again.

After Saxena, "Prompt Lookup Decoding" (2023). A match may overlap its own continuation, so a text that repeats itself
is continued for as long as drafts are wanted.

A search looks at every known token once, and reads four bytes of each: 1/32,000 of what attention reads of the same
tokens in a model with 128 KiB of keys and values a token. So no index of the text is kept.

Legend:
    R  rows
    S  slots
    K  tokens that a row may emit, at most
    N  tokens of the longest text
    D  drafts of a slot
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.step.lookup.continued import continued

Find = Callable[[np.ndarray, int], tuple[np.ndarray, int]]


class NotedTexts(NamedTuple):
    """The texts of slots behind a step, and what its rows emitted. No two of these rows share a slot.

    out_token_RK: int32, the tokens of each row, then -1.
    text_SN: int32. A text has kv_len_S + 1 tokens, the emitted ones included.
    """

    out_token_RK: Tensor
    slots_R: Tensor
    kv_len_S: Tensor
    max_len_S: Tensor
    stopped_S: Tensor
    text_SN: Tensor


def lookup_drafts(noted: NotedTexts, drafts_SD: Tensor, shared_S: Tensor, shortest: int, longest: int) -> None:
    """Append the tokens that rows emitted to their slots' texts, and look for drafts of what follows them; in place.

    Slots of rows that emitted nothing stay as they are.

    drafts_SD: int32. A slot gets as many drafts as there are, then -1: none if it has stopped, if its last
        `shortest` tokens (1 at least) stand nowhere else in the text, and none behind the last token that it may emit
        (max_len_S). Of the places where they stand, the one wins that shares most of the tokens before it, up to
        `longest`, and of these the latest.
    shared_S: int32. A slot gets how many tokens that is, or 0 if it gets no drafts.
    """
    find_drafts(noted, drafts_SD, shared_S, lambda known_N, count: continued(known_N, count, shortest, longest))


def find_drafts(noted: NotedTexts, drafts_SD: Tensor, shared_S: Tensor, find: Find) -> None:
    """Do what `lookup_drafts` does, with another search of a text. find: returns as many drafts as are wanted at most,
    and how many tokens their match shares."""
    out_token_RK, slots_R, kv_len_S, max_len_S, stopped_S, text_SN = noted
    texts, drafts, emitted_RK = text_SN.cpu().numpy(), drafts_SD.cpu().numpy(), out_token_RK.cpu().numpy()
    slots, ended = slots_R.tolist(), stopped_S.cpu().numpy()
    lengths, most = kv_len_S.cpu().numpy(), max_len_S.cpu().numpy()
    for row in (emitted_RK[:, 0] >= 0).nonzero()[0].tolist():
        slot, count = slots[row], int((emitted_RK[row] >= 0).sum())
        known = int(lengths[slot]) + 1
        texts[slot, known - count : known] = emitted_RK[row, :count]
        wanted = 0 if ended[slot] else max(0, min(drafts.shape[1], int(most[slot]) - known - 1))
        found, shared_S[slot] = find(texts[slot, :known], wanted)
        drafts[slot, : len(found)], drafts[slot, len(found) :] = found, -1
    if text_SN.device.type != "cpu":
        text_SN.copy_(torch.from_numpy(texts))
        drafts_SD.copy_(torch.from_numpy(drafts))


LOOKUP_DRAFTS = Op(
    "lookup_drafts",
    lookup_drafts,
    (
        Implementation("triton", "ridgeline.kernels.step.lookup.triton:lookup_drafts", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.lookup.op:lookup_drafts"),
    ),
)
