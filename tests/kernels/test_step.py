"""What a step does beside the network: the plain versions row by row, the kernels against the plain versions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ridgeline.core.plan import Finish
from ridgeline.kernels.op import Platform
from ridgeline.kernels.step.op import (
    CASES,
    STEP_ADVANCE,
    STEP_INPUTS,
    STEP_POST,
    STEP_TURNS,
    STEP_VERIFY,
    Case,
    StepInputs,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in STEP_INPUTS.implementations)]
BIG = (
    Case(counts=(1,) * 256, padded_rows=3, padded_tokens=3),
    Case(counts=(8000, 1, None, 100), padded_rows=4, padded_tokens=91),
    Case(counts=(1,) * 700 + (None,) * 24, padded_rows=300, padded_tokens=300, groups=4),
)
CASES_AND_DEVICES = [
    *((case, "cpu") for case in CASES),
    *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*CASES, *BIG)),
]


def chosen(op, name: str, device: str):
    if name == "triton":
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def by_hand(slots_R, start_R1, override_T, kv_len_S, last_token_S, stopped_S, tables, size) -> StepInputs:
    """One token after the other, on the host."""
    tokens = len(override_T)
    ids, positions, places = [0] * tokens, [0] * tokens, [[0] * tokens for _ in tables]
    live = [False] * tokens
    lengths, last, active = [], [], []
    starts = start_R1.tolist()
    for row, slot in enumerate(slots_R.tolist()):
        count, cached = starts[row + 1] - starts[row], int(kv_len_S[slot])
        runs = not bool(stopped_S[slot])
        active.append(runs)
        last.append(starts[row + 1] - 1 if count else 0)
        lengths.append((cached + count if runs else 1) if count else 0)
        for i in range(count):
            t, position = starts[row] + i, cached + i if runs else 0
            ids[t] = int(override_T[t]) if override_T[t] >= 0 else int(last_token_S[slot])
            positions[t] = position
            live[t] = runs
            for group, table in enumerate(tables):
                block = int(table[slot, position // size]) if runs else 0
                places[group][t] = block * size + position % size
    return StepInputs(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(places),
        torch.tensor(lengths), torch.tensor(last), torch.tensor(active), torch.tensor(live),
    )  # fmt: skip


@pytest.mark.parametrize(("case", "device"), CASES_AND_DEVICES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_inputs_are_those_made_by_hand(name: str, case: Case, device: str) -> None:
    _, arguments = case.inputs(torch.device(device))
    got = chosen(STEP_INPUTS, name, device)(*arguments)
    want = by_hand(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    for field in StepInputs._fields:
        assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), field


def drawn(case: Case, tables: dict[str, Tensor], slots_R: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Tokens (every third row draws its slot's first stop id, every seventh none) and which rows sample (most)."""
    generator = torch.Generator().manual_seed(1)
    token_R = torch.randint(0, case.vocab_size, (len(slots_R),), generator=generator).to(device)
    stops_R = tables["stop_ids_SE"][slots_R.long(), 0]
    third_R = (torch.arange(len(slots_R), device=device) % 3 == 0) & (stops_R >= 0)
    samples_R = torch.rand(len(slots_R), generator=generator) < 0.8
    seventh_R = torch.arange(len(slots_R), device=device) % 7 == 6
    return torch.where(third_R, stops_R, token_R).masked_fill(seventh_R, -1), samples_R.to(device)


@pytest.mark.parametrize(("case", "device"), CASES_AND_DEVICES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("penalties", [False, True])
def test_slots_advance_row_by_row(name: str, case: Case, penalties: bool, device: str) -> None:
    tables, arguments = case.inputs(torch.device(device))
    slots_R = arguments[0]
    inputs = STEP_INPUTS.reference(*arguments)
    token_R, samples_R = drawn(case, tables, slots_R, device)
    want = {field: table.cpu().clone() for field, table in tables.items()}
    want_token, want_finish = [], []
    for row, slot in enumerate(slots_R.tolist()):
        token, length = int(token_R[row]), int(inputs.kv_len_R[row])
        active = bool(inputs.active_R[row])
        emits = active and bool(samples_R[row])
        finish = Finish.NONE
        if emits and token < 0:
            finish = Finish.NAN
        elif emits and token in want["stop_ids_SE"][slot].tolist():
            finish = Finish.STOP
        elif emits and length + 1 >= want["max_len_S"][slot]:
            finish = Finish.LENGTH
        want_token.append(token if emits else -1)
        want_finish.append(finish)
        if active and length:
            want["kv_len_S"][slot] = length
        if emits:
            want["stopped_S"][slot] |= finish != Finish.NONE
        if emits and token >= 0:
            want["last_token_S"][slot] = token
            want["output_count_SV"][slot, token] += penalties
    out_token_R = torch.full((len(slots_R),), 77, dtype=torch.int32, device=device)
    out_finish_R = torch.full((len(slots_R),), 77, dtype=torch.int8, device=device)
    chosen(STEP_ADVANCE, name, device)(
        token_R, samples_R, slots_R, inputs.kv_len_R, inputs.active_R, tables["stop_ids_SE"], tables["max_len_S"],
        tables["kv_len_S"], tables["last_token_S"], tables["stopped_S"],
        tables["output_count_SV"] if penalties else None, out_token_R, out_finish_R,
    )  # fmt: skip
    assert out_token_R.tolist() == want_token
    assert out_finish_R.tolist() == want_finish
    for field, table in want.items():
        assert torch.equal(tables[field].cpu(), table), field


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("case", "device"), CASES_AND_DEVICES, ids=str)
@pytest.mark.parametrize("name", ["reference", *(one.name for one in STEP_TURNS.implementations)])
def test_rows_find_the_blocks_of_their_states(name: str, case: Case, device: str, marked: bool) -> None:
    _, arguments = case.inputs(torch.device(device))
    slots_R, start_R1, tables_ASC, size = arguments[0], arguments[1], arguments[6], arguments[7]
    inputs = STEP_INPUTS.reference(*arguments)
    counts = start_R1.diff().tolist()
    marks = [(3 * row + 1) % (count + 1) if marked else 0 for row, count in enumerate(counts)]
    marks_R = torch.tensor(marks, dtype=torch.int32, device=device) if marked else None
    for group, table_SC in enumerate(tables_ASC):
        given = (slots_R, start_R1, inputs.kv_len_R, inputs.last_R, inputs.places_AT[group], marks_R, table_SC, size)
        found = [x.tolist() for x in chosen(STEP_TURNS, name, device)(*given)]
        table = table_SC.tolist()
        for row, (slot, count, length, active) in enumerate(
            zip(slots_R.tolist(), counts, inputs.kv_len_R.tolist(), inputs.active_R.tolist(), strict=True)
        ):
            before, runs = length - count, bool(active and count)
            mark = marks[row] if runs else 0
            want = (
                table[slot][max(before - 1, 0) // size],
                table[slot][(length - 1) // size] if runs else 0,
                before <= 0,
                mark,
                table[slot][(before + mark - 1) // size] if mark else 0,
            )
            assert tuple(column[row] for column in found) == want, row


def test_the_cases_see_every_way_to_finish() -> None:
    seen = set()
    for case in (*CASES, *BIG[2:]):
        tables, arguments = case.inputs(torch.device("cpu"))
        inputs = STEP_INPUTS.reference(*arguments)
        token_R, samples_R = drawn(case, tables, arguments[0], "cpu")
        out = torch.zeros(len(token_R), dtype=torch.int32)
        finish_R = torch.zeros(len(token_R), dtype=torch.int8)
        STEP_ADVANCE.reference(
            token_R, samples_R, arguments[0], inputs.kv_len_R, inputs.active_R, tables["stop_ids_SE"],
            tables["max_len_S"], tables["kv_len_S"], tables["last_token_S"], tables["stopped_S"], None, out, finish_R,
        )  # fmt: skip
        seen |= set(finish_R.tolist())
    assert seen == {Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.NAN}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_bytes", [5, 1280, 4001])
def test_outcomes_are_posted_round_the_ring(name: str, num_bytes: int, device: str) -> None:
    """What is not a step's own place stays as it was."""
    post = chosen(STEP_POST, name, device)
    ring_QO = torch.full((3, 4016), 77, dtype=torch.uint8, pin_memory=device == "cuda")
    expected_QO = ring_QO.clone()
    turn_1 = torch.zeros(1, dtype=torch.int64, device=device)
    for turn in range(5):
        packed_O = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
        post(packed_O, ring_QO, turn_1)
        expected_QO[turn % 3, :8] = torch.tensor([turn, *[0] * 7], dtype=torch.uint8)
        expected_QO[turn % 3, 8 : 8 + num_bytes] = packed_O.cpu()
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(ring_QO, expected_QO)
    assert turn_1.item() == 5


def verified_by_hand(tokens, drafts, count, length, stops, limit) -> tuple[list[int], int]:
    """What a row emits whose tokens were drawn behind its last one and behind its drafts, and why it ends there."""
    emitted: list[int] = []
    for k in range(count):
        if k and drafts[k] != tokens[k - 1]:
            break
        if tokens[k] < 0:
            return emitted, Finish.NAN
        emitted.append(tokens[k])
        if tokens[k] in stops:
            return emitted, Finish.STOP
        if length - count + k + 2 >= limit:
            return emitted, Finish.LENGTH
    return emitted, Finish.NONE


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["reference", *(one.name for one in STEP_VERIFY.implementations)])
def test_rows_emit_what_their_drafts_made_right(name: str, seed: int) -> None:
    draw = random.Random(seed)
    rows, columns, vocabulary = 12, 4, 7
    slots_R = torch.tensor(draw.sample(range(rows + 2), rows), dtype=torch.int32)
    counts = [draw.randrange(columns + 1) for _ in range(rows)]
    active = [draw.random() < 0.85 for _ in range(rows)]
    drafts = [[draw.randrange(3) for _ in range(columns)] for _ in range(rows)]
    tokens = [[d if draw.random() < 0.8 else draw.randrange(vocabulary) for d in (*row[1:], 5)] for row in drafts]
    tokens = [[-1 if draw.random() < 0.05 else token for token in row] for row in tokens]
    lengths = [max(count, 1) + draw.randrange(20) if on else 1 for count, on in zip(counts, active, strict=True)]
    slots = rows + 3
    tables = {
        "stop_ids_SE": torch.tensor([[-1, draw.choice((-1, 1, 4))] for _ in range(slots)]),
        "max_len_S": torch.tensor([draw.randrange(4, 26) for _ in range(slots)]),
        "kv_len_S": torch.arange(slots) + 50,
        "last_token_S": torch.arange(slots) + 70,
        "stopped_S": torch.zeros(slots, dtype=torch.int32),
        "output_count_SV": torch.zeros(slots, vocabulary, dtype=torch.int32),
    }
    want = {field: table.clone() for field, table in tables.items()}
    want_tokens, want_finish = [], []
    for row, slot in enumerate(slots_R.tolist()):
        stops, limit = set(want["stop_ids_SE"][slot].tolist()) - {-1}, int(want["max_len_S"][slot])
        count = counts[row] if active[row] else 0
        emitted, finish = verified_by_hand(tokens[row], drafts[row], count, lengths[row], stops, limit)
        want_tokens.append([*emitted, *[-1] * (columns - len(emitted))])
        want_finish.append(finish)
        if active[row]:
            want["kv_len_S"][slot] = lengths[row] - count + max(len(emitted), min(count, 1))
        if emitted:
            want["last_token_S"][slot] = emitted[-1]
        want["stopped_S"][slot] = int(finish != Finish.NONE)
        for token in emitted:
            want["output_count_SV"][slot, token] += 1
    out_token_RK = torch.full((rows, columns), 77, dtype=torch.int32)
    out_finish_R = torch.full((rows,), 77, dtype=torch.int8)
    chosen(STEP_VERIFY, name, "cpu")(
        torch.tensor(tokens), torch.tensor(drafts), torch.tensor(counts), slots_R, torch.tensor(lengths),
        torch.tensor(active), *tables.values(), out_token_RK, out_finish_R,
    )  # fmt: skip
    assert out_token_RK.tolist() == want_tokens
    assert out_finish_R.tolist() == want_finish
    for field, table in want.items():
        assert torch.equal(tables[field], table), field
