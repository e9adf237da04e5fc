"""Which bucket a plan runs in, and what a bucket's inputs say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.buckets import MIXED_TOKENS, row_buckets
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.plan.step import Feature, PrefixGroup, RowKind, Rows, Span, StepPlan
from ridgeline.core.settings.speculation import MOST_VERIFIED, verified_widths
from ridgeline.worker import graphs
from ridgeline.worker.graphs import Buckets
from ridgeline.worker.inputs import DeviceInputs, Shape

DUMMY = 99


def plan(tokens: list[int], spans: dict[int, list[int]] | None = None, features: Feature = Feature.NONE) -> StepPlan:
    count = len(tokens)
    alike = len(set(tokens)) == 1 and (tokens[0] == 1 or not spans)
    rows = Rows(
        slots_R=np.arange(count, dtype=np.int32) + 10,
        generations_R=np.ones(count, np.int32),
        kinds_R=np.array([RowKind.CHUNK if row in (spans or {}) else RowKind.TOKEN for row in range(count)], np.int8),
        num_tokens_R=np.array(tokens, np.int32),
        num_logits_R=(np.arange(count) % 2 == 0).astype(np.int32),
        tokens_each=tokens[0] if alike else 0,
        features=features,
        num_logprobs=0,
    )
    given_spans = tuple(Span(row, np.array(ids, np.int32)) for row, ids in (spans or {}).items())
    return StepPlan(id=1, rows=rows, kv_bound_R=np.array(tokens, np.int32), spans=given_spans)


@given(
    max_rows=st.integers(1, 300),
    tokens=st.lists(st.integers(1, 64), min_size=1, max_size=300),
    max_tokens=st.sampled_from([16, 512, 8192]),
)
def test_a_bucket_holds_its_plan_and_wastes_little(max_rows: int, tokens: list[int], max_tokens: int) -> None:
    tokens = tokens[:max_rows]
    one_each = len(tokens) == sum(tokens)
    shape = Buckets(max_rows, max_tokens).find(len(tokens), sum(tokens), int(one_each))
    if one_each:
        assert shape is not None
        assert (shape.rows, shape.each) == (shape.tokens, 1)
        assert len(tokens) <= shape.rows <= min(max_rows, len(tokens) + 7)
    elif sum(tokens) > min(max_tokens, MIXED_TOKENS[-1]):
        assert shape is None
    elif shape is not None:
        assert shape.rows >= len(tokens)
        assert shape.tokens >= sum(tokens)
        assert shape.each == 0
        assert shape in Buckets(max_rows, max_tokens).shapes


def test_row_buckets_end_at_the_most_rows() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(256)[-2:] == [248, 256]


def test_inputs_of_a_mixed_step_with_padding() -> None:
    inputs = DeviceInputs(Shape(5, 16, 0), DUMMY, torch.device("cpu"))
    inputs.load(plan([3, 1, 2], {0: [7, 8, 9], 2: [5, 6]}))
    assert inputs.slots_R.tolist() == [10, 11, 12, DUMMY, DUMMY]
    assert inputs.start_R1.tolist() == [0, 3, 4, 6, 6, 6]
    assert inputs.samples_R.tolist() == [True, False, True, False, False]
    assert inputs.override_T.tolist() == [7, 8, 9, -1, 5, 6] + [-1] * 10


def test_inputs_of_a_decode_step_give_padding_rows_a_token() -> None:
    inputs = DeviceInputs(Shape(4, 4, 1), DUMMY, torch.device("cpu"))
    inputs.load(plan([1, 1]))
    assert inputs.slots_R.tolist() == [10, 11, DUMMY, DUMMY]
    assert inputs.start_R1.tolist() == [0, 1, 2, 3, 4]


def test_inputs_of_a_mixed_step_of_as_many_tokens_as_rows_give_padding_rows_none() -> None:
    inputs = DeviceInputs(Shape(4, 4, 0), DUMMY, torch.device("cpu"))
    inputs.load(plan([1, 2], {1: [7, 8]}))
    assert inputs.slots_R.tolist() == [10, 11, DUMMY, DUMMY]
    assert inputs.start_R1.tolist() == [0, 1, 3, 3, 3]


def test_inputs_of_a_step_of_several_tokens_each_give_padding_rows_as_many() -> None:
    inputs = DeviceInputs(Shape(4, 12, 3), DUMMY, torch.device("cpu"))
    inputs.load(plan([3, 3]))
    assert inputs.slots_R.tolist() == [10, 11, DUMMY, DUMMY]
    assert inputs.start_R1.tolist() == [0, 3, 6, 9, 12]
    for each in (0, 1, 3):  # without a plan: padding only
        empty = DeviceInputs(Shape(4, 4 * each or 12, each), DUMMY, torch.device("cpu"))
        assert empty.start_R1.tolist() == [0, each, 2 * each, 3 * each, 4 * each]


@pytest.mark.parametrize(("each", "tokens"), [(1, [3, 1]), (1, [2, 2]), (3, [3, 2]), (3, [1, 1])])
def test_inputs_refuse_rows_of_other_numbers_of_tokens(each: int, tokens: list[int]) -> None:
    inputs = DeviceInputs(Shape(4, 4 * each, each), DUMMY, torch.device("cpu"))
    with pytest.raises(ContractViolation, match=f"{each} tokens a row"):
        inputs.load(plan(tokens))


def test_inputs_rank_the_rows_of_prefix_groups() -> None:
    steady = plan([1, 1, 1, 1, 1])
    groups = PrefixGroup(np.array([1, 4]), 32), PrefixGroup(np.array([0, 2]), 16)
    steady = replace(steady, rows=replace(steady.rows, prefixes=groups))
    inputs = DeviceInputs(Shape(6, 6, 1), DUMMY, torch.device("cpu"), steady, cascade=True)
    assert inputs.prefix_4R is not None
    assert inputs.prefix_4R[:, [1, 4]].tolist() == [[0, 1], [0, 0], [2, 2], [32, 32]]
    assert inputs.prefix_4R[:, [0, 2]].tolist() == [[2, 3], [2, 2], [4, 4], [16, 16]]
    assert inputs.prefix_4R[3, [3, 5]].tolist() == [0, 0]
    assert inputs.slots_R.tolist() == [10, 11, 12, 13, 14, DUMMY]
    assert DeviceInputs(Shape(6, 6, 1), DUMMY, torch.device("cpu"), steady).prefix_4R is None


def test_the_same_rows_are_not_loaded_twice_but_spans_are() -> None:
    inputs = DeviceInputs(Shape(2, 2, 1), DUMMY, torch.device("cpu"))
    steady = plan([1, 1])
    inputs.load(steady)
    assert inputs.holds(steady)
    with_span = plan([1, 1], {1: [4]})
    inputs.load(with_span)
    assert not inputs.holds(with_span)
    inputs.load(steady)
    assert inputs.override_T.tolist() == [-1, -1]


def test_what_fails_inside_a_capture_is_what_is_told() -> None:
    """Not the capture's own complaint that it has become invalid."""

    class Broken:
        ended = False

        def capture_begin(self, **_: Any) -> None:
            pass

        def capture_end(self) -> None:
            self.ended = True
            raise RuntimeError("operation failed due to a previous error during capture")

    def work() -> None:
        raise ValueError("the cause")

    graph = Broken()
    with pytest.raises(ValueError, match="the cause"):
        graphs.record(graph, None, work)  # type: ignore[arg-type]
    assert graph.ended, "else the stream would go on recording"


@pytest.mark.gpu
def test_a_borrowed_tensor_is_the_same_memory() -> None:
    from ridgeline.worker.graphs import borrowed

    for dtype in (torch.bfloat16, torch.bool, torch.int64):
        own = torch.ones(3, 4, device="cuda").to(dtype)
        other = borrowed(own)
        assert (other.dtype, other.shape, other.data_ptr()) == (own.dtype, own.shape, own.data_ptr())
        own.zero_()
        assert not other.any()


@pytest.mark.parametrize(("rows", "tokens", "padded"), [(1, 9000, 8), (8, 9000, 8), (9, 9000, 48), (48, 48, 48)])
def test_steps_that_are_not_captured_come_with_few_numbers_of_rows(rows: int, tokens: int, padded: int) -> None:
    assert Buckets(48, 16_384).uncaptured(rows, tokens) == (padded, tokens, 0)


@pytest.mark.parametrize(("rows", "shared"), [(1, 16), (16, 16), (17, 32), (40, 48)])
def test_rows_that_share_their_first_blocks_have_decode_buckets_of_their_own(rows: int, shared: int) -> None:
    buckets = Buckets(48, 2048)
    assert buckets.share(rows) == (shared, shared, 1)
    assert buckets.share(rows) in buckets.sharing
    assert set(buckets.sharing) <= buckets.shapes


@pytest.mark.parametrize("max_rows", [1, 4, 60, 256, 1000])
@pytest.mark.parametrize("most", [1, 3, 5, 16])
def test_rows_that_verify_any_width_have_buckets_and_states(most: int, max_rows: int) -> None:
    """A bucket wastes fewer tokens than the widest buckets lie apart, or fewer than four rows, and less than a half."""
    widths = verified_widths(most, whole=False)
    sizes = StepSizes(device_type="cuda", itemsize=2, max_tokens=2048, max_seqs=max_rows, longest=0, drafts=most)
    buckets, states = Buckets(max_rows, 2048, widths), sizes.scratch
    for width in widths:
        for rows in range(1, max_rows + 2):
            shape = buckets.find(rows, rows * (1 + width), 1 + width)
            if rows > max_rows or rows * (1 + width) > MOST_VERIFIED:
                assert shape is None
                continue
            assert shape in buckets.shapes
            assert shape == (shape.rows, shape.rows * (1 + width), 1 + width)
            assert shape.tokens <= MOST_VERIFIED
            assert 0 <= shape.rows - rows < 4 or shape.tokens - rows * shape.each < 8 * (1 + most)
            assert shape.rows < 2 * rows
            assert width * shape.rows <= states


@pytest.mark.parametrize("max_rows", [1, 4, 16, 20, 256])
def test_no_bucket_has_more_rows_than_there_are_slots(max_rows: int) -> None:
    buckets = Buckets(max_rows, 2048)
    warm = {buckets.uncaptured(rows, 2048) for rows in (1, max_rows)}
    assert max(shape.rows for shape in buckets.shapes | warm) == max_rows


@given(tokens=st.lists(st.integers(1, 9), min_size=1, max_size=40), max_rows=st.sampled_from([16, 40]))
def test_a_bucket_takes_its_plan_over(tokens: list[int], max_rows: int) -> None:
    """Rows that verify three tokens each run where mixed rows do, as long as there are no buckets of their own."""
    for counts in (tokens[:max_rows], [1] * len(tokens[:max_rows]), [3] * len(tokens[:max_rows])):
        made = plan(counts)
        shape = Buckets(max_rows, 2048).find(len(counts), sum(counts), made.rows.tokens_each)
        assert shape is not None
        inputs = DeviceInputs(shape, DUMMY, torch.device("cpu"), made)
        starts = inputs.start_R1.tolist()
        assert starts[: len(counts) + 1] == [0, *np.cumsum(counts).tolist()]
        assert starts[-1] <= shape.tokens
        padding = set(np.diff(starts[len(counts) :]).tolist())
        assert padding <= {shape.each}
        assert inputs.tokens_each == (1 if made.rows.tokens_each == 1 else 0)
