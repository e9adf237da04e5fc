"""How a plan is dealt out to the stages of a pipeline. That parts mean the same is for `test_pipeline_machine`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline.core.plan.step import Feature, Guided, PrefixGroup, RowKind, Rows, Span, StepPlan
from ridgeline.ranks.messages import PlanReceiver, PlanSender, decode_from_leader, encode
from ridgeline.ranks.parts import Dealer, Part


def plan_of(decoding: int, chunks: list[int], number: int = 1, **fields: object) -> StepPlan:
    """A plan of rows that decode, and of prompts' chunks that end."""
    counts = np.array([1] * decoding + chunks, np.int32)
    kinds = np.array([RowKind.TOKEN] * decoding + [RowKind.CHUNK] * len(chunks), np.int8)
    slots = np.arange(len(counts), dtype=np.int32)
    ones, each = np.ones(len(counts), np.int32), int(counts.max() == 1)
    rows = Rows(slots, ones, kinds, counts, ones, each, Feature.NONE, 0, **fields)  # type: ignore[arg-type]
    spans = tuple(Span(decoding + i, np.arange(count, dtype=np.int32)) for i, count in enumerate(chunks))
    return StepPlan(number, rows, 100 + counts.astype(np.int64), spans)


def tokens(parts: list[Part]) -> list[int]:
    return [part.plan.num_tokens for part in parts]


def test_one_stage_gets_the_plan_itself() -> None:
    plan = plan_of(3, [50])
    [part] = Dealer(1).parts(plan)
    assert part.plan is plan


@pytest.mark.parametrize(
    ("decoding", "chunks", "stages", "wanted"),
    [
        (8, [], 2, [4, 4]),
        (7, [], 4, [2, 2, 2, 1]),
        (1, [], 4, [1]),
        (0, [4096], 4, [1024] * 4),
        (64, [960], 2, [512, 512]),
        (0, [5000], 2, [1250] * 4),
        (64, [16_384], 2, [2056] * 8),
        (0, [255], 2, [255]),  # either half would be too small
        (0, [100, 100, 100, 100], 2, [200, 200]),
        (0, [100, 100, 100], 2, [200, 100]),
        (4, [1000, 20, 500], 2, [762, 762]),
    ],
)
def test_parts_have_equally_many_tokens(decoding: int, chunks: list[int], stages: int, wanted: list[int]) -> None:
    plan = plan_of(decoding, chunks)
    parts = Dealer(stages).parts(plan)
    assert tokens(parts) == wanted
    decoded = [int((part.plan.rows.kinds_R == RowKind.TOKEN).sum()) for part in parts]
    assert max(decoded) - min(decoded) <= 1
    for row, count in enumerate(plan.rows.num_tokens_R.tolist()):
        mine = [(part.plan, own) for part in parts for own in np.flatnonzero(part.rows_R == row).tolist()]
        assert sum(int(each.rows.num_tokens_R[own]) for each, own in mine) == count
        assert [int(each.rows.num_logits_R[own]) for each, own in mine] == [0] * (len(mine) - 1) + [1]
        assert mine[-1][0].kv_bound_R[mine[-1][1]] == plan.kv_bound_R[row]
    for span in plan.spans:
        given = [own.token_ids for part in parts for own in part.plan.spans if part.rows_R[own.row] == span.row]
        np.testing.assert_array_equal(np.concatenate(given), span.token_ids)


def test_rows_with_a_common_prefix_are_neighbours() -> None:
    groups = PrefixGroup(np.array([0, 3, 5]), 64), PrefixGroup(np.array([1, 2, 4, 6, 7]), 128)
    first, second = Dealer(2).parts(plan_of(8, [], prefixes=groups))
    assert [part.rows_R.tolist() for part in (first, second)] == [[0, 1, 3, 5], [2, 4, 6, 7]]
    assert [(group.rows.tolist(), group.tokens) for group in first.plan.rows.prefixes] == [([0, 2, 3], 64)]
    assert [(group.rows.tolist(), group.tokens) for group in second.plan.rows.prefixes] == [([0, 1, 2, 3], 128)]


def test_a_pair_stays_together() -> None:
    pairs = Guided(0, 3, 1.5), Guided(2, 1, 2.0)
    for stages in (2, 3, 4):
        parts = Dealer(stages).parts(plan_of(4, [], guided=pairs))
        assert sorted(part.rows_R.tolist() for part in parts) == [[0, 3], [1, 2]]
        found = [(part.rows_R[row], part.rows_R[other], scale) for part in parts
                 for row, other, scale in part.plan.rows.guided]  # fmt: skip
        assert sorted(found) == sorted(pairs)
    [part] = Dealer(2).parts(plan_of(0, [300, 300], guided=(Guided(1, 0, 1.5),)))
    assert part.plan.rows.guided == (Guided(1, 0, 1.5),)


def test_a_part_waits_for_the_tokens_of_its_own_rows_alone() -> None:
    dealer, plan = Dealer(2), plan_of(4, [])
    first, second = dealer.parts(plan)
    assert (first.plan.after, second.plan.after) == (-1, -1)
    third, fourth = dealer.parts(replace(plan, id=2))
    assert (third.plan.after, fourth.plan.after) == (first.plan.id, second.plan.id)


def test_plans_that_share_their_rows_send_them_once() -> None:
    dealer, sender, receiver, plan = Dealer(2), PlanSender(), PlanReceiver(), plan_of(4, [])
    frames = []
    for number in (1, 2, 3):
        for index, part in enumerate(dealer.parts(replace(plan, id=number))):
            sent = sender.message(part.plan, index)
            frames.append(encode(sent))
            arrived = receiver.plan(decode_from_leader(frames[-1]))  # type: ignore[arg-type]
            np.testing.assert_array_equal(arrived.rows.slots_R, part.plan.rows.slots_R)
            assert (arrived.id, arrived.after) == (part.plan.id, part.plan.after)
            assert (sent.rows is None) == (number > 1)
    assert len(frames[-1]) < len(frames[0])


def test_marks_reach_a_rank_and_lie_in_the_piece_that_passes_them() -> None:
    """A piece that ends at a mark stores its state there anyway."""
    marks = np.array([0, 0, 1600, 2048, 0], np.int32)
    dealer, sender, receiver = Dealer(2), PlanSender(), PlanReceiver()
    plan = plan_of(2, [4096, 4096, 100], marks_R=marks)
    message = decode_from_leader(encode(sender.message(plan)))
    np.testing.assert_array_equal(receiver.plan(message).rows.marks_R, marks)
    assert receiver.plan(decode_from_leader(encode(PlanSender().message(plan_of(2, [9]))))).rows.marks_R is None
    passed: dict[int, list[int]] = {row: [] for row in range(5)}
    done = dict.fromkeys(range(5), 0)
    for part in dealer.parts(plan):
        for row, count, mark in zip(
            part.rows_R.tolist(), part.plan.rows.num_tokens_R.tolist(), part.plan.rows.marks_R.tolist(), strict=True
        ):
            assert 0 <= mark < count
            passed[row] += [done[row] + mark] if mark else []
            done[row] += count
            assert done[row] != marks[row] or passed[row] == []
    assert passed[2] == [1600]
    assert passed[3] in ([2048], [])


def test_no_piece_ends_before_a_mark_in_the_block_of_the_mark() -> None:
    """The next one would read its state where it stores another. It ends at the mark instead, or before the block."""
    for mark, wanted in ((2048, [2048, 2048]), (2049, [2049, 2047]), (2063, [2063, 2033]), (2064, [2048, 2048])):
        plan = plan_of(0, [4096], marks_R=np.array([mark], np.int32))
        parts = Dealer(2, long_piece=4096, block_size=16).parts(plan)
        assert tokens(parts) == wanted
        inside = [int(part.plan.rows.marks_R[0]) for part in parts if part.plan.rows.marks_R is not None]
        assert inside == [0, mark - wanted[0] if mark != wanted[0] else 0]
