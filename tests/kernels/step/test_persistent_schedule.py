"""The task graph of the persistent step, and the proof that it cannot hang or race."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.cases import LLAMA_1B, TINY, TINY_QWEN
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import CellAccess, CounterWait, StepSchedule, StepTask
from ridgeline.kernels.step.persistent.validate import InvalidSchedule, validate
from tests.kernels.step.brute_force import fault, random_marked_schedule, random_schedule

ROWS, BLOCKS, SPLITS = 2, 5, 2
SCHEDULE = build(TINY, ROWS, BLOCKS, SPLITS)


def accepts(schedule: StepSchedule, resident: int = 132) -> bool:
    try:
        validate(schedule, resident)
    except InvalidSchedule:
        return False
    return True


def with_task(schedule: StepSchedule, index: int, task: StepTask) -> StepSchedule:
    tasks = list(schedule.tasks)
    tasks[index] = task
    return replace(schedule, tasks=tuple(tasks))


def index_of(kind: str, layer: int, nth: int = 0) -> int:
    found = [at for at, task in enumerate(SCHEDULE.tasks) if (task.kind, task.layer) == (kind, layer)]
    return found[nth]


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([TINY, TINY_QWEN]),
    st.booleans(),
    st.booleans(),
)
def test_every_step_that_is_built_is_valid(
    rows: int, blocks: int, splits: int, shape: DenseShape, joins: bool, marked: bool
) -> None:
    schedule = build(shape, rows, blocks, splits, joins=joins, marked=marked)
    validate(schedule, blocks)
    for kind, outputs in (("gate_up", TINY.inner), ("head", TINY.vocabulary)):
        if shape is TINY:
            shares = [task.part for task in schedule.tasks if task.kind == kind and task.layer in (0, TINY.layers)]
            assert sorted(each for share in shares for each in range(*share)) == list(range(outputs))


def test_a_real_step_is_valid() -> None:
    validate(build(replace(LLAMA_1B, layers=2), 8, 132, 2), 132)
    validate(build(replace(LLAMA_1B, layers=2), 8, 132, 2, marked=True), 132)


def test_each_weight_is_read_by_one_block() -> None:
    for kind in ("qkv", "out", "gate_up", "down", "head"):
        shares = [
            task.part for task in SCHEDULE.tasks if task.kind == kind and task.layer == (2 if kind == "head" else 0)
        ]
        assert [start for start, _ in shares[1:]] == [stop for _, stop in shares[:-1]]
        assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


PHASES = [
    ("embed", 0),
    *((kind, layer) for layer in (0, 1) for kind in ("qkv", "attend", "combine", "out", "gate_up", "down")),
]


@pytest.mark.parametrize(("kind", "layer"), PHASES, ids=str)
@pytest.mark.parametrize("nth", [0, -1])
def test_a_dropped_signal_is_found(kind: str, layer: int, nth: int) -> None:
    index = index_of(kind, layer, nth)
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        validate(with_task(SCHEDULE, index, replace(SCHEDULE.tasks[index], signals=())), 132)


@pytest.mark.parametrize(("kind", "layer"), PHASES, ids=str)
@pytest.mark.parametrize("nth", [0, -1])
def test_a_doubled_signal_is_found(kind: str, layer: int, nth: int) -> None:
    index = index_of(kind, layer, nth)
    task = SCHEDULE.tasks[index]
    with pytest.raises(InvalidSchedule, match=r"before .* has written|still reads"):
        validate(with_task(SCHEDULE, index, replace(task, signals=task.signals * 2)), 132)


@pytest.mark.parametrize(("kind", "layer"), PHASES[1:], ids=str)
def test_a_wait_that_comes_one_task_late_is_found(kind: str, layer: int) -> None:
    index = index_of(kind, layer)
    task, block = SCHEDULE.tasks[index], next(each for each in SCHEDULE.blocks if index in each)
    following = block[block.index(index) + 1]
    moved = with_task(SCHEDULE, index, replace(task, waits=()))
    late = replace(moved.tasks[following], waits=(*moved.tasks[following].waits, *task.waits))
    with pytest.raises(InvalidSchedule, match=r"before .* has written|still reads"):
        validate(with_task(moved, following, late), 132)


def test_tasks_in_another_order_are_found() -> None:
    for block, tasks in enumerate(SCHEDULE.blocks):
        for at in range(len(tasks) - 1):
            one, other = SCHEDULE.tasks[tasks[at]], SCHEDULE.tasks[tasks[at + 1]]
            if (one.kind, one.layer) == (other.kind, other.layer):
                continue
            turned = [*tasks[:at], tasks[at + 1], tasks[at], *tasks[at + 2 :]]
            blocks = [*SCHEDULE.blocks[:block], tuple(turned), *SCHEDULE.blocks[block + 1 :]]
            assert not accepts(replace(SCHEDULE, blocks=tuple(blocks))), (str(one), str(other))


@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
def test_a_buffer_that_is_reused_one_step_early_is_found(kind: str) -> None:
    """The second layer writes where the first one's reads may not have ended: it waits for an earlier phase."""
    index = index_of(kind, 1)
    task = SCHEDULE.tasks[index]
    [(counter, _)] = task.waits
    count = sum(counter - 1 in each.signals for each in SCHEDULE.tasks)
    early = replace(task, waits=(CounterWait(counter - 1, count),))
    with pytest.raises(InvalidSchedule, match=r"before .* has written|still reads"):
        validate(with_task(SCHEDULE, index, early), 132)


def test_an_overwrite_beside_a_late_reader_is_found() -> None:
    one = CellAccess("a", 0, 1, 0, 1)

    def task(**fields: object) -> StepTask:
        return StepTask(kind="embed", layer=0, part=(0,), **fields)  # type: ignore[arg-type]

    tasks = (
        task(writes=(one,), signals=(0,)),
        task(reads=(one,), waits=(CounterWait(0, 1),), signals=(1,)),
        task(writes=(one,), waits=(CounterWait(0, 1),)),
    )
    early = StepSchedule(tasks=tasks, blocks=((0,), (1,), (2,)), counters=2, buffers={"a": (1, 1)})
    with pytest.raises(InvalidSchedule, match=r"may overwrite .* still reads it"):
        validate(early, 3)
    validate(with_task(early, 2, replace(tasks[2], waits=(CounterWait(1, 1),))), 3)


def test_a_wait_in_a_circle_is_found() -> None:
    index, later = index_of("attend", 0), SCHEDULE.tasks[index_of("down", 0)]
    task = SCHEDULE.tasks[index]
    circle = replace(task, waits=(*task.waits, CounterWait(later.signals[0], 1)))
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        validate(with_task(SCHEDULE, index, circle), 132)


def test_more_blocks_than_run_together_are_found() -> None:
    validate(SCHEDULE, BLOCKS)
    with pytest.raises(InvalidSchedule, match="5 blocks, and 4 can run at the same time"):
        validate(SCHEDULE, BLOCKS - 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: replace(s, blocks=s.blocks[1:]), "no block runs"),
        (lambda s: replace(s, blocks=(*s.blocks, (0,))), "runs already"),
        (lambda s: replace(s, blocks=(*s.blocks, (len(s.tasks),))), "does not exist"),
        (lambda s: replace(s, counters=s.counters - 1), "beyond the schedule's"),
        (lambda s: replace(s, buffers={**s.buffers, "qkv": (ROWS, 3)}), "reaches beyond the buffer 'qkv'"),
        (lambda s: with_task(s, 0, replace(s.tasks[0], writes=())), "no task before it writes all of that"),
    ],
)
def test_what_no_schedule_may_have_is_found(change: Callable[[StepSchedule], StepSchedule], told: str) -> None:
    with pytest.raises(InvalidSchedule, match=told):
        validate(change(SCHEDULE), 132)


MARKED = build(TINY, ROWS, BLOCKS, SPLITS, marked=True)


def marked_index(kind: str, layer: int) -> int:
    return next(at for at, task in enumerate(MARKED.tasks) if (task.kind, task.layer) == (kind, layer))


@pytest.mark.parametrize(("kind", "layer"), PHASES, ids=str)
def test_a_number_that_nobody_writes_is_found_where_buffers_are_marked(kind: str, layer: int) -> None:
    index = marked_index(kind, layer)
    with pytest.raises(InvalidSchedule, match="no task before it writes all of that"):
        validate(with_task(MARKED, index, replace(MARKED.tasks[index], writes=())), 132)


@pytest.mark.parametrize("kind", ["qkv", "attend", "combine", "out", "gate_up", "down"])
def test_a_marked_buffer_that_is_used_again_is_found(kind: str) -> None:
    """The second layer writes into the first one's buffer."""
    index, first = marked_index(kind, 1), MARKED.tasks[marked_index(kind, 0)]
    task = MARKED.tasks[index]
    again = replace(task, writes=(task.writes[0]._replace(buffer=first.writes[0].buffer), *task.writes[1:]))
    with pytest.raises(InvalidSchedule, match="is not its own alone"):
        validate(with_task(MARKED, index, again), 132)


def test_marked_tasks_in_a_circle_are_found() -> None:
    block, tasks = next((block, tasks) for block, tasks in enumerate(MARKED.blocks) if len(tasks) > 4)
    turned = replace(MARKED, blocks=(*MARKED.blocks[:block], tasks[::-1], *MARKED.blocks[block + 1 :]))
    with pytest.raises(InvalidSchedule, match="waits for ever"):
        validate(turned, 132)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda task: replace(task, signals=(0,)), "has counters, and marked buffers need none"),
        (lambda task: replace(task, reads=(CellAccess("logits", 0, 1, 0, 1),)), "nothing says that this was written"),
        (lambda task: replace(task, reads=task.writes), "no task before it writes"),
    ],
)
def test_what_no_marked_schedule_may_have_is_found(change: Callable[[StepTask], StepTask], told: str) -> None:
    index = marked_index("gate_up", 0)
    more = replace(MARKED, counters=1)
    with pytest.raises(InvalidSchedule, match=told):
        validate(with_task(more, index, change(MARKED.tasks[index])), 132)


def test_more_blocks_of_a_marked_schedule_than_run_together_are_found() -> None:
    with pytest.raises(InvalidSchedule, match="5 blocks, and 4 can run at the same time"):
        validate(MARKED, BLOCKS - 1)


def test_no_wrong_marked_schedule_of_some_is_accepted() -> None:
    right, accepted = agree(range(400), random_marked_schedule)
    assert 150 < right < 380, "both kinds are there"
    assert accepted == right, "it refuses none that is right, either"


@pytest.mark.thorough
def test_no_wrong_marked_schedule_of_many_is_accepted() -> None:
    right, accepted = agree(range(10_000, 20_000), random_marked_schedule)
    assert accepted == right > 4000


def agree(seeds: range, made: Callable[[int], StepSchedule] = random_schedule) -> tuple[int, int]:
    """Return how many schedules are right, and how many of these were accepted. Fails on one that is accepted and
    wrong."""
    right = accepted = 0
    for seed in seeds:
        schedule = made(seed)
        problem, taken = fault(schedule), accepts(schedule)
        assert not (problem and taken), f"schedule {seed} was accepted, and {problem}"
        right, accepted = right + (not problem), accepted + taken
    return right, accepted


def test_no_wrong_schedule_of_some_is_accepted() -> None:
    right, accepted = agree(range(400))
    assert 150 < right < 350, "both kinds are there"
    assert accepted == right, "it refuses none that is right, either"


@pytest.mark.thorough
def test_no_wrong_schedule_of_many_is_accepted() -> None:
    right, accepted = agree(range(10_000, 20_000))
    assert accepted > 0.99 * right > 5000


@given(st.randoms(use_true_random=False))
def test_no_wrong_schedule_that_hypothesis_finds_is_accepted(chosen: random.Random) -> None:
    agree(range(seed := chosen.randrange(2**32), seed + 3))
