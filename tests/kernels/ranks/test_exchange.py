"""Exchanges over peer memory: processes that write into each other's memory, as GPUs do over a link."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS, inbox_bytes, peers
from ridgeline.kernels.ranks.exchange import rows, words
from ridgeline.kernels.ranks.exchange.cost import rows_bytes, swap_bytes, words_bytes
from tests.kernels.ranks.ranks import run_ranks

CPU = torch.device("cpu")
HELD, WIDTH, USED = 3, 70, 3
# The capacity and the tokens of each rank, in steps that follow each other: some have none
STEPS = [(4, (4, 0, 3)), (2, (1, 2, 0)), (4, (2, 4, 4)), (1, (0, 1, 0))]
FEW = 4  # programs of a launch
MANY = (FEW + 3, (FEW + 2, 1, FEW + 3))  # more tokens than programs


def tokens(rank: int, step: int, count: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a rank's (x, experts, weights, what is added): small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x_TM = torch.randint(-4, 5, (count, WIDTH), generator=generator).to(torch.bfloat16)
    expert_TK = torch.rand(count, ranks * HELD, generator=generator).topk(USED, dim=1).indices
    if count > 1:
        expert_TK[1] = ranks * HELD  # it goes nowhere
    weight_TK = torch.randint(1, 3, (count, USED), generator=generator).float()
    return x_TM, expert_TK.int(), weight_TK, (x_TM > 0).to(torch.bfloat16)


def computed(x_M: Tensor, expert_K: Tensor, weight_K: Tensor, first: int, held: int) -> Tensor:
    """Return a rank's result for a token: expert e multiplies by e + 1."""
    there_K = expert_K < held
    return x_M * (weight_K * (expert_K + first + 1) * there_K).sum()


def wanted(rank: int, step: int, count: int, ranks: int, add: bool) -> Tensor:
    x_TM, expert_TK, weight_TK, add_TM = tokens(rank, step, count, ranks)
    factor_TK = torch.where(expert_TK < ranks * HELD, weight_TK * (expert_TK + 1), 0)
    y_TM = x_TM.float() * factor_TK.sum(1, keepdim=True)
    return (y_TM + add_TM.float() if add else y_TM).to(torch.bfloat16)


def rank(number: int, ranks: int, folder: Path, form: str) -> None:
    """One process: it dispatches, computes and combines, step by step, and saves what it got."""
    boxes = [
        torch.from_file(str(folder / f"{form}{n}"), shared=True, size=size_of(form, ranks), dtype=torch.uint8)
        for n in range(ranks)
    ]
    rows.PROGRAMS = FEW  # type: ignore[misc]
    bases = [box.data_ptr() for box in boxes]
    got, steps = [], [*STEPS, MANY] if form == "rows" else STEPS
    if form == "words":
        half = inbox_bytes(ranks)
        there, back = peers(bases, number, CPU), peers([base + half for base in bases], number, CPU)
    else:
        epoch_P, base_R = torch.zeros(PROGRAMS, dtype=torch.int32), torch.tensor(bases)
        there = back = rows.Rooms(boxes[number], base_R, epoch_P, number, ranks, room_of(ranks))
    way = {"words": words, "rows": rows}[form]
    for step, (capacity, counts) in enumerate(steps):
        x_TM, expert_TK, weight_TK, add_TM = tokens(number, step, counts[number], ranks)
        apart = step == 2 or number == 0  # ranks may take their own parts apart or not
        came = way.dispatch(x_TM, expert_TK, weight_TK, HELD, capacity, there, receives=not apart)
        if apart:
            _ = words.receive(came, HELD, capacity, there) if form == "words" else rows.receive(capacity, there)
        x_NM, expert_NK, weight_NK = came
        y_NM = torch.full_like(x_NM, torch.nan)
        for place in range(ranks * capacity):
            if (expert_NK[place] < HELD).any():
                y_NM[place] = computed(x_NM[place], expert_NK[place], weight_NK[place], number * HELD, HELD)
        add = add_TM if step % 2 else None
        if apart:
            way.send_back(y_NM, expert_NK, HELD, capacity, back)
        finish = way.add_up if apart else way.combine
        got.append(finish(y_NM, expert_NK, expert_TK, HELD, capacity, add, back))
    torch.save(got, folder / f"{form}-got{number}")


def room_of(ranks: int) -> rows.Room:
    return rows.Room.of(ranks, MANY[0], WIDTH, USED, 2)


def size_of(form: str, ranks: int) -> int:
    return 2 * inbox_bytes(ranks) if form == "words" else room_of(ranks).size


FORMS, RANKS = ("words", "rows"), 3


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ranks got that exchanged tokens in one form and then in the other."""
    folder = tmp_path_factory.mktemp("exchanged")
    for form, number in product(FORMS, range(RANKS)):
        with (folder / f"{form}{number}").open("wb") as file:
            file.truncate(size_of(form, RANKS))
    run_ranks("tests.kernels.ranks.test_exchange", RANKS, folder, *FORMS)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_token_gets_the_results_of_its_experts(form: str, exchanged: Path) -> None:
    for number in range(RANKS):
        steps = [*STEPS, MANY] if form == "rows" else STEPS
        for step, got_TM in enumerate(torch.load(exchanged / f"{form}-got{number}")):
            want_TM = wanted(number, step, steps[step][1][number], RANKS, bool(step % 2))
            torch.testing.assert_close(got_TM, want_TM, rtol=1e-2, atol=0.5)  # the interpreter rounds bfloat16 to zero


def test_few_tokens_of_halves_go_as_words() -> None:
    assert words.fits(torch.empty(3, 7168, dtype=torch.bfloat16), 8, words.LARGEST)
    assert not words.fits(torch.empty(3, 7168, dtype=torch.bfloat16), 8, words.LARGEST + 1)
    assert not words.fits(torch.empty(3, 8192, dtype=torch.bfloat16), 8, 1)
    assert not words.fits(torch.empty(3, 64), 8, 1)


def test_bytes_of_an_exchange() -> None:
    """Two ranks, tokens that all want both of them: half of all rows cross the link, whatever the form."""
    there, back = rows_bytes(10, 16, 100, used=2, ranks=2, reached=2.0, itemsize=2)
    assert (there, back) == (10 * 200 + 16 * 16, 10 * 200)
    assert words_bytes(10, 16, 100, used=2, ranks=2, reached=2.0, itemsize=2) == (2 * there, 2 * back)
    assert swap_bytes(16, 100, used=2, ranks=2, itemsize=2) == (16 * 216, 16 * 200)
