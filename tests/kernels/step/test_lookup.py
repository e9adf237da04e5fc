"""Prompt lookup against a search that looks at every place."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.step.lookup.cases import CASES, LookupCase
from ridgeline.kernels.step.lookup.op import LOOKUP_DRAFTS, continued
from tests.kernels.step.records import noted_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in LOOKUP_DRAFTS.implementations)]
LONG = (  # longer than what a program looks at together
    LookupCase(lengths=(9000, 4096, 4097), vocab_size=9, shortest=3, longest=64, drafts=5, columns=6),
    LookupCase(lengths=(8200, 12300), vocab_size=300, shortest=1, longest=3, drafts=5, columns=6),
)


def by_hand(known: list[int], shortest: int, longest: int, count: int) -> tuple[list[int], int]:
    """Return the `count` tokens that follow the best of all earlier places, repeating the text from there to its end as
    often as needed, and the number of tokens that this place shares."""
    best = (0, 0)
    for place in range(1, len(known)):
        shared = 0
        while shared < min(longest, place) and known[place - 1 - shared] == known[-1 - shared]:
            shared += 1
        best = max(best, (shared, place))
    if best[0] < shortest or not count:
        return [], 0
    text = list(known)
    for _ in range(count):
        text.append(text[best[1] + len(text) - len(known)])
    return text[len(known) :], best[0]


@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 9),
)
def test_drafts_are_what_followed_the_longest_match(known: list[int], shortest: int, more: int, count: int) -> None:
    found, shared = continued(np.array(known, np.int32), count, shortest, shortest + more)
    assert (found.tolist(), shared) == by_hand(known, shortest, shortest + more, count)


def test_a_text_that_repeats_itself_goes_on_beyond_what_is_known() -> None:
    known = np.array([9, 1, 2, 1, 2], np.int32)
    assert continued(known, 5, 2, 2)[0].tolist() == [1, 2, 1, 2, 1]
    assert continued(known, 5, 3, 3)[0].tolist() == []


def check(case: LookupCase, name: str, device: str, seed: int = 0) -> int:
    """Compare what an implementation leaves in the tables with a search by hand. Return how many drafts there were."""
    if name == "triton":
        pytest.importorskip("triton")
    search = LOOKUP_DRAFTS.choose(Platform.of(torch.device(device)), name)
    arguments = case.inputs(torch.device(device), seed)
    tables = [x.cpu().clone() for x in arguments[:8]]
    search(*noted_of(arguments))
    text_SN, drafts_SD, shared_S = (x.cpu() for x in arguments[5:8])
    emitted_RK, slots_R, kv_len_S, max_len_S, stopped_S, texts, drafts, shared = tables
    drafted = 0
    for row, slot in enumerate(slots_R.tolist()):
        emitted = [token for token in emitted_RK[row].tolist() if token >= 0]
        if not emitted:
            continue
        known = int(kv_len_S[slot]) + 1
        texts[slot, known - len(emitted) : known] = torch.tensor(emitted)
        room = 0 if stopped_S[slot] else max(0, min(case.drafts, int(max_len_S[slot]) - known - 1))
        want, shared[slot] = by_hand(texts[slot, :known].tolist(), case.shortest, case.longest, room)
        drafts[slot] = torch.tensor(want + [-1] * (case.drafts - len(want)))
        drafted += len(want)
    assert torch.equal(text_SN, texts)
    assert drafts_SD.tolist() == drafts.tolist()
    assert shared_S.tolist() == shared.tolist()
    return drafted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_slots_get_the_drafts_of_their_texts(name: str, case: LookupCase, device: str) -> None:
    assert check(case, name, device) or case not in LONG  # some short ones have none


@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_meet_anywhere(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several blocks, of few and many matches that begin in one block and end in another."""
    kernels = pytest.importorskip("ridgeline.kernels.step.lookup.triton")
    monkeypatch.setattr(kernels, "BLOCK", block)
    draw = random.Random(seed)
    lengths = tuple(draw.choice((0, draw.randrange(1, 12), draw.randrange(150))) for _ in range(8))
    shortest = draw.randrange(1, 4)
    case = LookupCase(
        lengths=(33, *lengths), vocab_size=draw.choice((2, 3, 9)), room=draw.choice((3, 9, 100)),
        shortest=shortest, longest=shortest + draw.choice((-1, 0, 1, 3, 60)),
        drafts=draw.choice((1, 5, 16)), columns=draw.choice((1, 6, 17)),
    )  # fmt: skip
    check(case, "triton", "cuda" if torch.cuda.is_available() else "cpu", seed)
