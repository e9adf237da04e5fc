"""Rows that share their first blocks attend to them together: the same outputs, and every key in exactly one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, AttentionShape, RaggedBatch, Schedule
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base.op import Platform

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Shared(NamedTuple):
    """These rows' first `blocks` blocks are the same."""

    rows: tuple[int, ...]
    blocks: int


class Batch(NamedTuple):
    case: AttentionCase
    groups: tuple[Shared, ...]


def decode(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, length) for length in lengths)


ALIBI = "slopes, a soft cap, among longer rows"
BATCHES = {
    "two rows": Batch(AttentionCase(rows=decode(49, 70)), (Shared((0, 1), 3),)),
    "interleaved groups and rows alone": Batch(
        AttentionCase(rows=decode(300, 500, 310, 17, 900, 257, 1, 560, 700)),
        (Shared((0, 2, 5), 16), Shared((1, 4, 8, 7), 31)),
    ),
    "more rows than a gang": Batch(
        AttentionCase(rows=decode(*range(210, 250)), num_heads=8, num_kv_heads=2, block_size=64),
        (Shared(tuple(range(40)), 3),),
    ),
    "a gang's last row is alone": Batch(
        AttentionCase(rows=decode(*[200] * 17), num_heads=8, num_kv_heads=2, head_dim=32),
        (Shared(tuple(range(17)), 12),),
    ),
    "every other gang is a single row": Batch(
        AttentionCase(
            rows=decode(*[64 * tiles + own for tiles in (28, 5, 25, 7, 31) for own in (9, 30, 70)]),
            num_heads=32,
            num_kv_heads=1,
        ),
        tuple(Shared((3 * i, 3 * i + 1, 3 * i + 2), 4 * tiles) for i, tiles in enumerate((28, 5, 25, 7, 31))),
    ),
    "odd shapes, a sink, a soft cap": Batch(
        AttentionCase(rows=decode(400, 33, 390, 385), num_heads=6, head_dim=80, block_size=8, sinks=True, softcap=5.0),
        (Shared((0, 2, 3), 48),),
    ),
    ALIBI: Batch(
        AttentionCase(
            rows=((1, 300), (40, 100), (1, 390), (3, 200), (1, 700), (1, 290)),
            num_heads=8,
            num_kv_heads=4,
            softcap=5.0,
            alibi=True,
        ),
        (Shared((5, 0, 4, 2), 17),),
    ),
    "the widest heads": Batch(
        AttentionCase(rows=decode(300, 33, 290), num_heads=8, num_kv_heads=1, head_dim=512, block_size=64),
        (Shared((0, 2), 4),),
    ),
    "one block per token": Batch(
        AttentionCase(rows=decode(100, 90, 80), num_heads=3, num_kv_heads=1, block_size=1, sinks=True),
        (Shared((2, 0, 1), 77),),
    ),
    "blocks longer than key tiles": Batch(
        AttentionCase(rows=decode(1100, 1030), num_heads=2, block_size=256, head_dim=64), (Shared((0, 1), 4),)
    ),
    "among longer rows": Batch(
        AttentionCase(rows=((1, 300), (40, 100), (1, 290), (1, 1), (3, 200), (0, 5), (1, 420))),
        (Shared((0, 2, 6), 17),),
    ),
}
IN_ALL_TYPES = tuple(BATCHES[name] for name in ("two rows", "odd shapes, a sink, a soft cap", ALIBI))
PARAMETERS = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


def prefixes(groups: tuple[Shared, ...], num_rows: int, block_size: int) -> Tensor:
    """`prefix_4R`, as cascade.py has it."""
    prefix_4R = torch.zeros(4, num_rows, dtype=torch.int32)
    rank = 0
    for group in groups:
        for member, row in enumerate(group.rows):
            prefix_4R[:, row] = torch.tensor(
                [rank + member, rank, rank + len(group.rows), group.blocks * block_size], dtype=torch.int32
            )
        rank += len(group.rows)
    return prefix_4R


def make(batch: Batch, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, RaggedBatch]:
    """As the case's inputs. A group's first blocks are those of one of its rows; what no query sees is NaN or inf."""
    case = batch.case
    q_THD, k_cache, v_cache, ragged = case.inputs(dtype, torch.device(device))
    table_SC, slots_R = ragged.block_table_SC, ragged.slots_R
    for rows, blocks in batch.groups:
        for row in rows:
            table_SC[slots_R[row], :blocks] = table_SC[slots_R[rows[-1]], :blocks]
    visible = torch.zeros(k_cache.shape[0], case.block_size, dtype=torch.bool, device=device)
    for row, (new, length) in enumerate(case.rows):
        for p in range(length if new else 0):
            visible[table_SC[slots_R[row], p // case.block_size].long(), p % case.block_size] = True
    units = torch.stack((k_cache, v_cache), 1).masked_fill(~visible[:, None, None, :, None], torch.nan)
    units[1::2].masked_fill_(~visible[1::2, None, None, :, None], torch.inf)
    return q_THD, units[:, 0], units[:, 1], ragged


def schedule_of(batch: Batch, ragged: RaggedBatch, prefix_4R: Tensor | None = None, **changes: Any) -> Schedule:
    """prefix_4R: of other groups than the batch's."""
    case = batch.case
    if prefix_4R is None:  # no copy otherwise: one from pageable memory cannot be captured
        prefix_4R = prefixes(batch.groups, len(case.rows), case.block_size).to(ragged.kv_len_R.device)
    of_layers = AttentionShape(
        **{
            "num_tokens": sum(new for new, _ in case.rows),
            "tokens_each": ragged.tokens_each,
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "prefix_4R": prefix_4R,
            "alibi": case.alibi,
            **changes,
        }
    )
    return make_schedule(ragged.start_R1, ragged.kv_len_R, ragged.slots_R, of_layers)


@pytest.mark.few(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@PARAMETERS
def test_outputs_are_those_of_rows_on_their_own(batch: Batch, dtype: torch.dtype, device: str) -> None:
    """Some twice with one schedule, as layers do. Tolerance: 8 roundings, as for every implementation."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    if dtype != (torch.bfloat16 if device == "cuda" else torch.float32) and batch not in IN_ALL_TYPES:
        pytest.skip("each kernel takes a second to compile, and seconds to interpret")
    q_THD, k_cache, v_cache, ragged = make(batch, dtype, device)
    options = batch.case.options(dtype, torch.device(device))
    expected = PAGED_ATTENTION.reference(q_THD, k_cache, v_cache, ragged, **options)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    schedule = schedule_of(batch, ragged)
    assert schedule.cascade is not None
    ragged = replace(ragged, schedule=schedule, num_tokens_R=None, kv_bound_R=None)
    for _ in range(2 if batch in IN_ALL_TYPES or device == "cuda" else 1):
        out = attend(q_THD, k_cache, v_cache, ragged, **options)
        worst = (out.double() - expected.double()).abs().max().item()
        assert worst <= 8 * max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@PARAMETERS
def test_a_rows_keys_are_its_items_and_its_gangs_stretches(batch: Batch, device: str) -> None:
    *_, ragged = make(batch, torch.float32, device)
    schedule = schedule_of(batch, ragged)
    cascade = schedule.cascade
    assert cascade is not None
    num_items, num_stretches = int(schedule.counts_2[0]), int(cascade.count_1)
    assert num_items <= len(schedule.items_I8)
    assert num_stretches <= len(cascade.stretches_I6)
    keys_of: dict[int, list[int]] = {}
    parts: list[int] = []
    for _, rank, size, begin, end, part in cascade.stretches_I6[:num_stretches].tolist():
        assert begin < end
        for member in range(size):
            keys_of.setdefault(int(cascade.members_R[rank + member]), []).extend(range(begin, end))
            parts.append(part + member)
    assert sorted(parts) == list(range(len(parts)))
    assert len(parts) <= cascade.max_parts
    used: list[int] = []
    for index, item in enumerate(schedule.items_I8[:num_items].tolist()):
        keys_of.setdefault(item[1], []).extend(range(item[4], item[5]))
        first, step, count = cascade.items_I3[index].tolist()
        if index == item[6]:
            used += [first + i * step for i in range(count)]
    assert sorted(used) == sorted(parts)
    for row, (new, length) in enumerate(batch.case.rows):
        if 0 < new <= schedule.few:
            assert sorted(keys_of[int(ragged.start_R1[row])]) == list(range(length))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_row_leaves_its_group_and_disturbs_nobody(stopped: int, device: str) -> None:
    """It has kv_len 1 on the device, while the groups are the host's."""
    batch = Batch(AttentionCase(rows=decode(300, 290, 400, 77)), (Shared((0, 1, 2), 17),))
    q_THD, k_cache, v_cache, ragged = make(batch, torch.float32, device)
    ragged.kv_len_R[stopped] = 1
    options = batch.case.options(torch.float32, torch.device(device))
    expected = PAGED_ATTENTION.reference(q_THD, k_cache, v_cache, ragged, **options)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    out = attend(q_THD, k_cache, v_cache, replace(ragged, schedule=schedule_of(batch, ragged)), **options)
    assert (out - expected).abs().max().item() <= 8e-6


@pytest.mark.parametrize("device", DEVICES)
def test_without_groups_nothing_changes(device: str) -> None:
    batch = Batch(AttentionCase(rows=decode(300, 290, 400, 77)), ())
    q_THD, k_cache, v_cache, ragged = make(batch, torch.float32, device)
    options = batch.case.options(torch.float32, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    plain = attend(q_THD, k_cache, v_cache, ragged, **options)
    assert torch.equal(
        attend(q_THD, k_cache, v_cache, replace(ragged, schedule=schedule_of(batch, ragged)), **options), plain
    )


def test_windows_and_fixed_schedules_know_no_groups() -> None:
    batch = BATCHES["two rows"]
    *_, ragged = make(batch, torch.float32, "cpu")
    assert schedule_of(batch, ragged, window=20).cascade is None
    assert schedule_of(batch, ragged, fixed=True).cascade is None


def test_a_schedule_without_positions_is_refused_where_there_are_slopes() -> None:
    batch = BATCHES[ALIBI]
    q_THD, k_cache, v_cache, ragged = make(batch, torch.float32, "cpu")
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device("cpu")), "triton")
    ragged = replace(ragged, schedule=schedule_of(batch, ragged, alibi=False))
    with pytest.raises(ValueError, match="with alibi"):
        attend(q_THD, k_cache, v_cache, ragged, **batch.case.options(torch.float32, torch.device("cpu")))


@pytest.mark.gpu
def test_a_captured_graph_serves_other_groups_and_lengths() -> None:
    case = AttentionCase(rows=decode(*[900] * 24), num_heads=8, head_dim=64)
    batch = Batch(case, (Shared(tuple(range(24)), 48),))
    q_THD, k_cache, v_cache, ragged = make(batch, torch.bfloat16, "cuda")
    options = case.options(torch.bfloat16, torch.device("cuda"))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device("cuda")), "triton")
    prefix_4R = prefixes((), 24, case.block_size).cuda()

    def step() -> Tensor:
        schedule = schedule_of(batch, ragged, prefix_4R=prefix_4R)
        return attend(q_THD, k_cache, v_cache, replace(ragged, schedule=schedule), **options)

    ragged = replace(ragged, num_tokens_R=None, kv_bound_R=None)
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THD = step()
    for groups in ((), batch.groups, (Shared((3, 5, 6), 20), Shared(tuple(range(8, 24)), 47)), (Shared((1, 0), 4),)):
        for length in (900, 800, 1):
            prefix_4R.copy_(prefixes(groups, 24, case.block_size))
            ragged.kv_len_R[::3] = length
            graph.replay()
            expected = PAGED_ATTENTION.reference(q_THD, k_cache, v_cache, ragged, **options)
            assert (out_THD - expected).abs().max().item() <= 8 * torch.finfo(torch.bfloat16).eps
