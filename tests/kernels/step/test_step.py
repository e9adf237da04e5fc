"""What a step does beside the network: the plain versions row by row, the kernels against the plain versions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.step import Finish
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.step.cases import CASES, KEEP_CASES, KeepCase, StepCase
from ridgeline.kernels.step.keep import STEP_KEEP
from ridgeline.kernels.step.op import STEP_ADVANCE, STEP_INPUTS, STEP_METADATA, STEP_POST, SlotAdvance, StepInputs
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.kernels.step.verify import STEP_VERIFY
from tests.kernels.step.records import advance_of, inputs_of, verify_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in STEP_INPUTS.implementations)]
BIG = (
    StepCase(counts=(1,) * 256, padded_rows=3, padded_tokens=3),
    StepCase(counts=(8000, 1, None, 100), padded_rows=4, padded_tokens=91),
    StepCase(counts=(1,) * 700 + (None,) * 24, padded_rows=300, padded_tokens=300, groups=4),
)
CASES_AND_DEVICES = [
    *((case, "cpu") for case in CASES),
    *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*CASES, *BIG)),
]


def chosen(op, name: str, device: str):
    if name == "triton":
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def by_hand(slots_R, start_R1, override_T, kv_len_S, last_token_S, stopped_S, tables, size, drafts=None) -> StepInputs:
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
            ids[t] = int(override_T[t])
            if override_T[t] < 0:
                ids[t] = max(0, int(drafts[slot, i - 1])) if i else int(last_token_S[slot])
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
def test_inputs_are_those_made_by_hand(name: str, case: StepCase, device: str) -> None:
    _, arguments = case.inputs(torch.device(device))
    got = chosen(STEP_INPUTS, name, device)(*inputs_of(arguments))
    want = by_hand(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    assert got.tree is None
    for field in StepInputs._fields[:-1]:
        assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), field


DRAFTED = (
    StepCase(counts=(6,) * 5),
    StepCase(counts=(6, 6, None, 6), padded_rows=2, padded_tokens=12, groups=2, block_size=4),
    StepCase(counts=(2, 40, 6, 1, 0, 3), padded_tokens=5),
    StepCase(counts=(17,) * 3, padded_rows=1, padded_tokens=17, groups=4),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", DRAFTED, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("drafts", [5, 16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tokens_without_override_are_drafts(name: str, case: StepCase, drafts: int, share: float, device: str) -> None:
    """share: of the tokens that may be drafts, how many are. With none of them, drafts change nothing."""
    generator = torch.Generator().manual_seed(2)
    _, arguments = case.inputs(torch.device(device))
    starts, override_T = arguments[1].tolist(), arguments[2]
    for start, end in pairwise(starts):
        behind = override_T[start + 1 : min(end, start + 1 + drafts)]
        behind[(torch.rand(len(behind), generator=generator) < share).to(device)] = -1
    drafts_SD = torch.randint(-1, 4, (len(arguments[3]), drafts + 2), generator=generator).int().to(device)[:, :drafts]
    got = chosen(STEP_INPUTS, name, device)(*inputs_of([*arguments, drafts_SD]))
    want = by_hand(*(x.cpu() if isinstance(x, Tensor) else x for x in (*arguments, drafts_SD)))
    without = chosen(STEP_INPUTS, name, device)(*inputs_of(arguments))
    for field in StepInputs._fields[:-1]:
        assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), field
        assert share or torch.equal(getattr(got, field), getattr(without, field)), field


def drawn(case: StepCase, tables: dict[str, Tensor], slots_R: Tensor, device: str) -> tuple[Tensor, Tensor]:
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
def test_slots_advance_row_by_row(name: str, case: StepCase, penalties: bool, device: str) -> None:
    tables, arguments = case.inputs(torch.device(device))
    slots_R = arguments[0]
    inputs = STEP_INPUTS.reference(*inputs_of(arguments))
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
    given = (
        token_R, samples_R, slots_R, inputs.kv_len_R, inputs.active_R, tables["stop_ids_SE"], tables["max_len_S"],
        tables["kv_len_S"], tables["last_token_S"], tables["stopped_S"],
        tables["output_count_SV"] if penalties else None, out_token_R, out_finish_R,
    )  # fmt: skip
    chosen(STEP_ADVANCE, name, device)(*advance_of(given))
    assert out_token_R.tolist() == want_token
    assert out_finish_R.tolist() == want_finish
    for field, table in want.items():
        assert torch.equal(tables[field].cpu(), table), field


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("case", "device"), CASES_AND_DEVICES, ids=str)
@pytest.mark.parametrize("name", ["reference", *(one.name for one in STEP_METADATA.implementations)])
def test_rows_find_the_blocks_of_their_states(name: str, case: StepCase, device: str, marked: bool) -> None:
    _, arguments = case.inputs(torch.device(device))
    slots_R, start_R1, tables_ASC, size = arguments[0], arguments[1], arguments[6], arguments[7]
    inputs = STEP_INPUTS.reference(*inputs_of(arguments))
    counts = start_R1.diff().tolist()
    marks = [(3 * row + 1) % (count + 1) if marked else 0 for row, count in enumerate(counts)]
    marks_R = torch.tensor(marks, dtype=torch.int32, device=device) if marked else None
    for group, table_SC in enumerate(tables_ASC):
        given = (slots_R, start_R1, inputs.kv_len_R, inputs.last_R, inputs.places_AT[group], marks_R, table_SC, size)
        found = [x.tolist() for x in chosen(STEP_METADATA, name, device)(*given)]
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
        inputs = STEP_INPUTS.reference(*inputs_of(arguments))
        token_R, samples_R = drawn(case, tables, arguments[0], "cpu")
        out = torch.zeros(len(token_R), dtype=torch.int32)
        finish_R = torch.zeros(len(token_R), dtype=torch.int8)
        given = (
            token_R, samples_R, arguments[0], inputs.kv_len_R, inputs.active_R, tables["stop_ids_SE"],
            tables["max_len_S"], tables["kv_len_S"], tables["last_token_S"], tables["stopped_S"], None, out, finish_R,
        )  # fmt: skip
        STEP_ADVANCE.reference(*advance_of(given))
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


def verified_by_hand(tokens, drafts, cached, stops, limit) -> tuple[list[int], int]:
    """Return the tokens that a row emits, and the reason why it ends there.

    tokens: those drawn behind its last one and behind its drafts. cached: the tokens before its last one.
    """
    emitted: list[int] = []
    for k, token in enumerate(tokens):
        if k and (drafts[k - 1] < 0 or drafts[k - 1] != emitted[-1]):
            break
        if token < 0:
            return emitted, Finish.NAN
        emitted.append(token)
        if token in stops:
            return emitted, Finish.STOP
        if cached + 1 + len(emitted) >= limit:
            return emitted, Finish.LENGTH
    return emitted, Finish.NONE


VOCABULARY = 7
ENDS = (Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.NAN)


@dataclass
class Verified:
    """A step of rows that verify drafts, and its outcome by hand."""

    given: tuple[Tensor, ...]  # all arguments before the tables
    tables: dict[str, Tensor]
    wanted: dict[str, Tensor]
    tokens: list[list[int]]
    finish: list[int]
    drafted: list[int]

    @classmethod
    def drawn(cls, seed: int, rows: int, columns: int, stop_ids: int) -> Verified:
        draw = random.Random(seed)
        slots, dummy, spare = rows + 3, rows + 2, draw.randrange(3)
        slots_R = [slot if draw.random() < 0.9 else dummy for slot in draw.sample(range(dummy), rows)]
        active = [slot != dummy and draw.random() < 0.9 for slot in slots_R]
        counts = [draw.choice((0, 1, columns, draw.randrange(columns + 1))) for _ in range(rows)]
        drafts = [[draw.randrange(3) for _ in range(columns - 1 + spare)] for _ in range(slots)]
        for row in drafts:
            if draw.random() < 0.4:  # from here on there are none
                absent = draw.randrange(len(row) + 1)
                row[absent:] = [-1] * (len(row) - absent)
        places = draw.sample(range(rows * columns + 5), rows * columns)
        places_RK = [places[row * columns : (row + 1) * columns] for row in range(rows)]
        token_P = [draw.randrange(-1, VOCABULARY) for _ in range(rows * columns + 5)]
        for row, slot in enumerate(slots_R):
            for place, draft in zip(places_RK[row], drafts[slot], strict=False):
                if draw.random() < 0.85:
                    token_P[place] = draft
            if draw.random() < 0.15:
                token_P[draw.choice(places_RK[row])] = -1
        cached = [draw.randrange(20) for _ in range(rows)]
        kv_len = [before + count if on else 1 for before, count, on in zip(cached, counts, active, strict=True)]
        stops = [[draw.choice((-1, -1, 1, 4, 6)) for _ in range(stop_ids)] for _ in range(slots)]
        limits = [draw.randrange(4, 40) for _ in range(slots)]
        tables = {
            "stop_ids_SE": torch.tensor(stops),
            "max_len_S": torch.tensor(limits),
            "kv_len_S": torch.arange(slots) + 50,
            "last_token_S": torch.arange(slots) + 70,
            "stopped_S": torch.zeros(slots, dtype=torch.int32),
            "output_count_SV": torch.randint(3, (slots, VOCABULARY), dtype=torch.int32),
        }
        for slot in set(range(slots)) - {slot for slot, on in zip(slots_R, active, strict=True) if on}:
            tables["stopped_S"][slot] = 1
        wanted = {field: table.clone() for field, table in tables.items()}
        found: tuple[list, list, list] = ([], [], [])
        for row, slot in enumerate(slots_R):
            count = counts[row] if active[row] else 0
            tokens = [token_P[place] for place in places_RK[row][:count]]
            emitted, finish = verified_by_hand(tokens, drafts[slot], cached[row], set(stops[slot]) - {-1}, limits[slot])
            drafted = sum(draft >= 0 for draft in drafts[slot][: max(0, count - 1)])
            for column, value in zip(found, (emitted, finish, drafted), strict=True):
                column.append(value)
            if active[row] and kv_len[row]:
                wanted["kv_len_S"][slot] = cached[row] + (max(1, len(emitted)) if count else 0)
            if emitted:
                wanted["last_token_S"][slot] = emitted[-1]
            if finish:
                wanted["stopped_S"][slot] = 1
            for token in emitted:
                wanted["output_count_SV"][slot, token] += 1
        integers = {"dtype": torch.int32}
        given = (
            torch.tensor(token_P), torch.tensor(places_RK, **integers), torch.tensor(counts, **integers),
            torch.tensor(drafts, **integers).view(slots, -1), torch.tensor(slots_R, **integers),
            torch.tensor(kv_len), torch.tensor(active),
        )  # fmt: skip
        found[0][:] = [[*emitted, *[-1] * (columns - len(emitted))] for emitted in found[0]]
        return cls(given, tables, wanted, *found)


VERIFYING = ["reference", *(one.name for one in STEP_VERIFY.implementations)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("columns", "stop_ids"), [(4, 2), (6, 64), (17, 3), (2, 5), (1, 4)])
@pytest.mark.parametrize("name", VERIFYING)
def test_rows_emit_what_their_drafts_made_right(name: str, columns: int, stop_ids: int, seed: int, device: str) -> None:
    rows, penalties = 1 + 5 * seed, seed % 3 > 0
    step = Verified.drawn(seed, rows, columns, stop_ids)
    token_P, *given = (x.to(device) for x in step.given)
    tables = {field: table.to(device) for field, table in step.tables.items()}
    if not penalties:
        step.wanted["output_count_SV"] = step.tables["output_count_SV"]
    outs = (
        torch.full((rows, columns), 77, dtype=torch.int32, device=device),
        torch.full((rows,), 77, dtype=torch.int8, device=device),
        torch.full((rows,), 77, dtype=torch.int8, device=device),
    )
    counted = tables["output_count_SV"] if penalties else None
    drawn_P = token_P.int() if seed % 2 else token_P
    chosen(STEP_VERIFY, name, device)(*verify_of((drawn_P, *given, *list(tables.values())[:-1], counted, *outs)))
    assert [out.tolist() for out in outs] == [step.tokens, step.finish, step.drafted]
    for field, table in step.wanted.items():
        assert torch.equal(tables[field].cpu(), table), field


def test_the_steps_see_every_way_to_finish_behind_a_draft() -> None:
    seen = set()
    for seed in range(8):
        step = Verified.drawn(seed, 1 + 5 * seed, 6, 64 if seed % 2 else 2)
        seen |= {
            (finish, sum(token >= 0 for token in tokens) + (finish == Finish.NAN) > 1)
            for tokens, finish in zip(step.tokens, step.finish, strict=True)
        }
    assert seen == {(finish, later) for finish in ENDS for later in (False, True)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", VERIFYING)
def test_rows_without_drafts_advance(name: str, seed: int, device: str) -> None:
    step = Verified.drawn(seed, 20, 1, 4)
    token_P, places_RK, num_logits_R, drafts_SD, slots_R, kv_len_R, active_R = (x.to(device) for x in step.given)
    found = []
    for verifies in (False, True):
        tables = {field: table.to(device, copy=True) for field, table in step.tables.items()}
        token_RK = torch.empty(20, 1, dtype=torch.int32, device=device)
        finish_R, drafted_R = torch.empty(2, 20, dtype=torch.int8, device=device)
        drafted_R.zero_()
        given, outs = (slots_R, kv_len_R, active_R, *tables.values()), (token_RK, finish_R, drafted_R)
        if verifies:
            flat = (token_P, places_RK, num_logits_R, drafts_SD, *given, *outs)
            chosen(STEP_VERIFY, name, device)(*verify_of(flat))
        else:
            token_R, samples_R = token_P[places_RK[:, 0].long()], num_logits_R > 0
            STEP_ADVANCE.reference(token_R, samples_R, SlotAdvance(*given), token_RK[:, 0], finish_R)
        found.append((*outs, *tables.values()))
    for advanced, verified in zip(*found, strict=True):
        assert torch.equal(advanced, verified)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", KEEP_CASES, ids=str)
@pytest.mark.parametrize("name", ["reference", *(one.name for one in STEP_KEEP.implementations)])
def test_states_that_stay_go_where_later_steps_look_for_them(name: str, case: KeepCase, device: str) -> None:
    """Token by token: what a token leaves is in the block of its entry until a later one of that block comes."""
    given, scratch_DR, units_NW = case.inputs(torch.device(device))
    layer_step, rows = len(units_NW) // case.layers, len(case.kept)
    want, units_NW = units_NW.clone(), units_NW.to(device)
    table_SC, size = given[5].cpu(), case.block_size
    for row, (kept, length) in enumerate(zip(case.kept, case.lengths, strict=True)):
        for draft in range((kept or 1) - 1):
            target = int(table_SC[row + 1, (length + 1 + draft) // size])
            ends = (length + 2 + draft) % size == 0 or draft + 2 == kept
            for layer in range(case.layers if ends else 0):
                want[target + layer * layer_step] = want[int(scratch_DR[draft, row]) + layer * layer_step]
    units = GroupUnits(units_NW, *given[5:], case.layers, layer_step)
    chosen(STEP_KEEP, name, device)(*given[:5], scratch_DR, units)
    assert torch.equal(units_NW.cpu()[1:], want[1:])
    assert rows == 1 or not torch.equal(want, case.inputs(torch.device("cpu"))[2])
