"""Drafts from what other requests have written lately: the token that followed the same n tokens last.

A table of hashes holds, for every n tokens in a row (an n-gram), the token that followed them most recently. An entry
is written for every token that is emitted, and a chain of drafts is as many look-ups: the last n tokens give a draft,
the last n - 1 and that draft the next one. So a token costs O(1), the memory is bounded, nothing is ever searched, and
no text needs to be kept: an entry that is overwritten ends a chain, and nothing else.

    entry   bits 62 … 32   of the hash, to tell n-grams apart that share a place
            bits 31 … 0    the token that followed
    place   the lowest bits of the hash

One look-up in 2³¹ takes an n-gram for another one. That is a draft that is not right, which costs a token of a step.

All ranks must make the same drafts, and a request's speed should not depend on a race. So if a step writes several
entries to one place, the largest one stays. The entry of an earlier step there is always replaced.

Legend:
    R  rows
    S  slots
    K  tokens that a row may emit, at most
    N  tokens of the longest text
    D  drafts of a slot
    H  places of the table, a power of two
    E  tokens that are noted
    G  tokens of an n-gram
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.step.lookup.op import NotedTexts

NOTHING = -1  # the entry of a place that is free
# The polynomial's base (Knuth, MMIX) and the factor that mixes its value (Stafford's variants of MurmurHash3), odd and
# below 2⁶³
BASE = 0x5851F42D4C957F2D
MIX = 0x7FB5D329728EA185


def recent_drafts(
    noted: NotedTexts, shared_S: Tensor, salt_S: Tensor, next_H: Tensor, drafts_SD: Tensor, length: int
) -> None:
    """Note what followed the last `length` tokens before each emitted token, of all rows, and then draft what follows
    rows whose own text has no match as long as that; in place.

    It runs behind `lookup_drafts` of the same rows: the texts hold the emitted tokens. A text of fewer than `length`
    tokens before a token has no n-gram there.

    shared_S: int32, how many tokens a match in the slot's own text shares. Below `length`, what is found here takes the
        place of the drafts that the slot has; if nothing is, they stay.
    salt_S: int64, hashes themselves. Slots with unlike salts find nothing of each other.
    next_H: int64, the table.
    """
    tables = (*noted, shared_S, salt_S)
    emitted_RK, slots, lengths, most, ended, texts, shared, salts = (x.cpu().numpy() for x in tables)
    entries_H, drafts = next_H.cpu().numpy(), drafts_SD.cpu().numpy()
    known_R, emits_RK = lengths[slots] + 1, emitted_RK >= 0

    row_E, column_E = emits_RK.nonzero()
    place_E = (known_R - emits_RK.sum(1))[row_E] + column_E
    slot_E, place_E = slots[row_E][place_E >= length], place_E[place_E >= length]
    gram_EG = texts[slot_E[:, None], place_E[:, None] + np.arange(-length, 0)]
    note(entries_H, gram_EG, salts[slot_E], texts[slot_E, place_E])

    room_R = np.where(ended[slots] != 0, 0, np.minimum(most[slots] - known_R - 1, drafts.shape[1]))
    asks_R = emits_RK[:, 0] & (shared[slots] < length) & (known_R >= length) & (room_R > 0)
    slots, known_R, room_R = slots[asks_R], known_R[asks_R], room_R[asks_R]
    gram_RG = texts[slots[:, None], known_R[:, None] + np.arange(-length, 0)]
    for draft in range(int(room_R.max(initial=0))):
        token_R = followed(entries_H, gram_RG, salts[slots])
        found_R = (token_R >= 0) & (room_R > draft)
        slots, room_R, token_R = slots[found_R], room_R[found_R], token_R[found_R]
        if draft == 0:
            drafts[slots] = -1
        drafts[slots, draft] = token_R
        gram_RG = np.concatenate((gram_RG[found_R, 1:], token_R[:, None]), 1)
    if drafts_SD.device.type != "cpu":
        next_H.copy_(torch.from_numpy(entries_H))
        drafts_SD.copy_(torch.from_numpy(drafts))


def note(entries_H: np.ndarray, gram_EG: np.ndarray, salt_E: np.ndarray, token_E: np.ndarray) -> None:
    """Write which tokens follow n-grams to the table, in place."""
    key_E = keys(gram_EG, salt_E)
    place_E = _places(key_E, len(entries_H))
    entries_H[place_E] = NOTHING
    np.maximum.at(entries_H, place_E, _checks(key_E) | token_E)


def followed(entries_H: np.ndarray, gram_RG: np.ndarray, salt_R: np.ndarray) -> np.ndarray:
    """Return the token that followed each n-gram, or -1, as int32."""
    key_R = keys(gram_RG, salt_R)
    entry_R = entries_H[_places(key_R, len(entries_H))]
    known_R = (entry_R >= 0) & ((entry_R >> 32 << 32) == _checks(key_R))
    return np.where(known_R, entry_R & 0x7FFFFFFF, -1).astype(np.int32)


def keys(gram_EG: np.ndarray, salt_E: np.ndarray) -> np.ndarray:
    """Return the hashes of n-grams, uint64: a polynomial of their tokens, and the salt, mixed."""
    key_E = np.zeros(len(gram_EG), np.uint64)
    for token_E in gram_EG.T:
        key_E = key_E * np.uint64(BASE) + token_E.astype(np.uint64)
    key_E ^= salt_E.astype(np.uint64)
    for shift in (31, 27):
        key_E = (key_E ^ (key_E >> np.uint64(shift))) * np.uint64(MIX)
    return key_E ^ (key_E >> np.uint64(33))


def _places(key_E: np.ndarray, size: int) -> np.ndarray:
    return (key_E & np.uint64(size - 1)).astype(np.int64)


def _checks(key_E: np.ndarray) -> np.ndarray:
    return (key_E & np.uint64(0x7FFFFFFF_00000000)).astype(np.int64)


RECENT_DRAFTS = Op(
    "recent_drafts",
    recent_drafts,
    (
        Implementation("triton", "ridgeline.kernels.step.lookup.recent_triton:recent_drafts", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.lookup.recent:recent_drafts"),
    ),
)
