"""Drafts from recent outputs against a table of Python's own integers, and against a dictionary of n-grams."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.step.lookup.cases import RECENT_CASES, RecentCase
from ridgeline.kernels.step.lookup.op import NotedTexts
from ridgeline.kernels.step.lookup.recent import NOTHING, RECENT_DRAFTS, keys, recent_drafts
from tests.kernels.step.records import noted_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in RECENT_DRAFTS.implementations)]
ALL = (1 << 64) - 1


def key_of(gram: list[int], salt: int) -> int:
    key = 0
    for token in gram:
        key = (key * 6364136223846793005 + token) & ALL
    key ^= salt & ALL
    for shift in (31, 27):
        key = ((key ^ (key >> shift)) * 0x7FB5D329728EA185) & ALL
    return key ^ (key >> 33)


class Table:
    """What a table of hashes of so many places holds: place → (check, token)."""

    def __init__(self, size: int, held: list[int]) -> None:
        self.size = size
        self.entries = {
            place: (entry >> 32, entry & 0xFFFFFFFF) for place, entry in enumerate(held) if entry != NOTHING
        }

    def split(self, gram: list[int], salt: int) -> tuple[int, int]:
        key = key_of(gram, salt)
        return key % self.size, (key >> 32) % (1 << 31)

    def note(self, followed: list[tuple[list[int], int, int]]) -> None:
        """Take (n-gram, salt, token) of one step."""
        new: dict[int, list[tuple[int, int]]] = {}
        for gram, salt, token in followed:
            place, check = self.split(gram, salt)
            new.setdefault(place, []).append((check, token))
        self.entries |= {place: max(entries) for place, entries in new.items()}

    def drafts(self, gram: list[int], salt: int, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            place, check = self.split([*gram, *found][len(found) :], salt)
            if place not in self.entries or self.entries[place][0] != check:
                break
            found.append(self.entries[place][1])
        return found


def check(case: RecentCase, name: str, device: str, seed: int = 0) -> int:
    """Compare what an implementation leaves in the tables with the table of integers. Return how many drafts there
    were."""
    if name == "triton":
        pytest.importorskip("triton")
    run = RECENT_DRAFTS.choose(Platform.of(torch.device(device)), name)
    arguments = case.inputs(torch.device(device), seed)
    emitted, slots, kv_len, max_len, stopped, texts, shared, salts, held, drafts = (x.tolist() for x in arguments[:10])
    run(*noted_of(arguments))
    table, length, followed = Table(case.places, held), case.length, []
    rows = [(slot, [t for t in row if t >= 0]) for slot, row in zip(slots, emitted, strict=True) if row[0] >= 0]
    for slot, tokens in rows:
        known = kv_len[slot] + 1
        for place in range(known - len(tokens), known):
            if place >= length:
                followed.append((texts[slot][place - length : place], salts[slot], texts[slot][place]))
    table.note(followed)
    found = 0
    for slot, _ in rows:
        known = kv_len[slot] + 1
        room = min(case.drafts, max_len[slot] - known - 1)
        if not stopped[slot] and shared[slot] < length <= known and room > 0:
            new = table.drafts(texts[slot][known - length : known], salts[slot], room)
            found += len(new)
            drafts[slot] = new + [-1] * (case.drafts - len(new)) if new else drafts[slot]
    assert Table(case.places, arguments[8].tolist()).entries == table.entries
    assert arguments[9].tolist() == drafts
    assert arguments[5].tolist() == texts
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", RECENT_CASES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_slots_get_the_drafts_of_the_table(name: str, case: RecentCase, device: str) -> None:
    found = sum(check(case, name, device, seed) for seed in range(3))
    assert found or len(case.lengths) == 1


@pytest.mark.parametrize("lanes", [4, 32])
@pytest.mark.parametrize("seed", range(10))
def test_tokens_are_noted_in_any_number_of_rounds(seed: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("ridgeline.kernels.step.lookup.recent_triton")
    monkeypatch.setattr(kernels, "LANES", lanes)
    draw = random.Random(seed)
    lengths = tuple(draw.choice((0, draw.randrange(1, 9), draw.randrange(60))) for _ in range(9))
    case = RecentCase(
        lengths=(33, *lengths), vocab_size=draw.choice((2, 3, 300_000)), room=draw.choice((3, 9, 100)),
        length=draw.choice((1, 2, 5)), places=draw.choice((2, 64, 1024)),
        drafts=draw.choice((1, 5, 16)), columns=draw.choice((1, 3, 17)),
    )  # fmt: skip
    check(case, "triton", "cuda" if torch.cuda.is_available() else "cpu", seed)


Steps = st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=2, max_size=2), min_size=1, max_size=25)


@settings(max_examples=60)
@given(steps=Steps, length=st.integers(1, 4), salted=st.booleans())
def test_a_large_table_is_a_dictionary_of_n_grams(steps: list[list[list[int]]], length: int, salted: bool) -> None:
    """Two texts grow, each by some tokens a step. A draft is what followed the same n-gram last, in either of them if
    they have the same salt. Where two texts disagree in one step, either is right."""
    after: dict[tuple[int, ...], set[int]] = {}
    texts: list[list[int]] = [[3], [3]]
    salts = [0, -0x123456789ABCDEF if salted else 0]
    text_SN, next_H = torch.zeros(2, 90, dtype=torch.int32), torch.full((1 << 20,), NOTHING)
    for step in steps:
        new: dict[tuple[int, ...], set[int]] = {}
        emitted_RK = torch.full((2, 3), -1, dtype=torch.int32)
        for slot, tokens in enumerate(step):
            for token in tokens:
                if len(texts[slot]) >= length:
                    new.setdefault((salts[slot], *texts[slot][-length:]), set()).add(token)
                texts[slot].append(token)
            emitted_RK[slot, : len(tokens)] = torch.tensor(tokens)
            text_SN[slot, : len(texts[slot])] = torch.tensor(texts[slot])
        after |= new
        drafts_SD = torch.full((2, 4), -1, dtype=torch.int32)
        kv_len_S = torch.tensor([len(text) - 1 for text in texts])
        many_S, none_S = torch.tensor([999, 999]), torch.zeros(2, dtype=torch.int32)
        noted = NotedTexts(emitted_RK, torch.arange(2).int(), kv_len_S, many_S, none_S, text_SN)
        recent_drafts(noted, none_S, torch.tensor(salts), next_H, drafts_SD, length)
        for slot, tokens in enumerate(step):
            text = list(texts[slot])
            for draft in drafts_SD[slot].tolist() if tokens else []:
                known = after.get((salts[slot], *text[-length:])) if len(text) >= length else None
                assert draft in (known or {-1})
                if known is None:
                    break
                text.append(draft)
    assert int((next_H != NOTHING).sum()) == len(after)


def test_hashes_spread_and_salts_part() -> None:
    gram_EG = np.stack(np.unravel_index(np.arange(1 << 16), (64, 32, 32)), 1).astype(np.int32)
    for salt in (0, -7):
        key_E = keys(gram_EG, np.full(len(gram_EG), salt, np.int64))
        taken = len(np.unique(key_E % np.uint64(1 << 16)))
        assert abs(taken / (1 << 16) - (1 - np.exp(-1))) < 0.01
        assert len(np.unique(key_E >> np.uint64(32) & np.uint64(0x7FFFFFFF))) > 65_530
        assert key_E[:9].tolist() == [key_of(gram, salt) for gram in gram_EG[:9].tolist()]
