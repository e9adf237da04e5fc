"""Every run of a small schedule, tried one by one, and schedules at random to try it on.

It shares nothing with the validator but the records: no order is derived. A state is how far each block is, which tasks
are under way, and which task wrote each cell last. All states that any run can reach are visited. Who reads a marked
cell goes on when it is written, or while a task that writes it is under way: the cell may be there before that ends.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ridgeline.kernels.step.persistent.tasks import CellAccess, CounterWait, StepSchedule, StepTask

Cell = tuple[str, int, int]


def cells(accesses: tuple[CellAccess, ...]) -> frozenset[Cell]:
    return frozenset(
        (each.buffer, row, column)
        for each in accesses
        for row in range(each.row, each.row_end)
        for column in range(each.column, each.column_end)
    )


def fault(schedule: StepSchedule) -> str:
    """Return what goes wrong in some run, or "" if every run ends with what the tasks give one by one."""
    reads, writes = (
        [cells(task.reads) for task in schedule.tasks],
        [cells(task.writes) for task in schedule.tasks],
    )

    def is_marked(cell: Cell) -> bool:
        return cell[0] in schedule.marked

    memory: dict[Cell, int] = {}
    wanted: list[dict[Cell, int]] = []  # by task, who wrote what it reads
    for task in range(len(schedule.tasks)):
        wanted.append({cell: memory.get(cell, -1) for cell in reads[task]})
        if any(writer < 0 and cell[0] not in schedule.inputs for cell, writer in wanted[-1].items()):
            return "a cell is read that none wrote"
        memory.update(dict.fromkeys(writes[task], task))
    blocks = schedule.blocks
    first = ((0,) * len(blocks), frozenset[int](), frozenset[tuple[Cell, int]]())
    seen, todo = {first}, [first]
    while todo:
        at, running, held = todo.pop()
        now = dict(held)
        counters = [0] * schedule.counters
        for block, tasks in enumerate(blocks):
            for task in tasks[: at[block]]:
                for counter in schedule.tasks[task].signals:
                    counters[counter] += 1
        moves = []
        for block, tasks in enumerate(blocks):
            if at[block] == len(tasks):
                continue
            task = tasks[at[block]]
            if task in running:
                after = tuple(each + (one == block) for one, each in enumerate(at))
                moves.append((after, running - {task}, frozenset((now | dict.fromkeys(writes[task], task)).items())))
            elif all(counters[counter] >= least for counter, least in schedule.tasks[task].waits) and all(
                cell in now or any(cell in writes[other] for other in running)
                for cell in reads[task]
                if is_marked(cell)
            ):
                early = {cell for cell in reads[task] if is_marked(cell) and cell not in now}
                if any(now.get(cell, -1) != writer for cell, writer in wanted[task].items() if cell not in early):
                    return f"{task} reads what it should not"
                if any(wanted[task][cell] not in running for cell in early):
                    return f"{task} reads what another task writes"
                if any(is_marked(cell) and cell in now for cell in writes[task]):
                    return f"{task} writes what is written"
                for other in running:
                    if writes[task] & (reads[other] | writes[other]) or (reads[task] - early) & writes[other]:
                        return f"{task} and {other} meet"
                moves.append((at, running | {task}, held))
        if not moves and any(each < len(tasks) for each, tasks in zip(at, blocks, strict=True)):
            return "a run waits for ever"
        if not moves and now != memory:
            return "a run ends otherwise"
        for move in moves:
            if move not in seen:
                seen.add(move)
                todo.append(move)
    return ""


def random_marked_schedule(seed: int) -> StepSchedule:
    """Return a small schedule of marked buffers: tasks on random blocks in a random order, most of which read what an
    earlier task has written. Some schedules read or write what they may not, or wait in a circle."""
    chosen = random.Random(seed)
    count, blocks = chosen.randint(2, 7), chosen.randint(1, 3)
    width = 3
    free = [("a", 0, column) for column in range(width)] + [
        ("b", row, column) for row in range(2) for column in range(2)
    ]
    written: list[Cell] = []
    tasks = []
    for index in range(count):
        sources = written if chosen.random() < 0.97 else [("a", 0, chosen.randrange(width))]
        reads = [chosen.choice(sources) for _ in range(chosen.randint(0, 2) if sources else 0)]
        target = chosen.choice(free) if free else ("a", 0, 0)
        if target in free and chosen.random() < 0.97:
            free.remove(target)
        written.append(target)
        tasks.append(StepTask(
            kind="embed", layer=0, part=(index,), reads=tuple(map(one_cell, reads)), writes=(one_cell(target),)
        ))  # fmt: skip
    lists: list[list[int]] = [[] for _ in range(blocks)]
    for index in range(count):
        lists[chosen.randrange(blocks)].append(index)
    if chosen.random() < 0.4:
        chosen.shuffle(chosen.choice(lists))
    buffers = {"a": (1, width), "b": (2, 2)}
    return StepSchedule(
        tasks=tuple(tasks), blocks=tuple(map(tuple, lists)), counters=0, buffers=buffers, marked=frozenset("ab")
    )


def one_cell(cell: Cell) -> CellAccess:
    name, row, column = cell
    return CellAccess(name, row, row + 1, column, column + 1)


def random_schedule(seed: int) -> StepSchedule:
    """Return a small schedule: tasks with random accesses on random blocks, and waits between most of those that meet.
    Half of the schedules are then changed somewhere."""
    chosen = random.Random(seed)
    count, blocks = chosen.randint(2, 7), chosen.randint(1, 3)
    buffers = {"a": (1, 3), "b": (2, 2)}

    def access() -> CellAccess:
        name = chosen.choice("ab")
        rows, columns = buffers[name]
        row, column = chosen.randrange(rows), chosen.randrange(columns)
        return CellAccess(name, row, chosen.randint(row + 1, rows), column, chosen.randint(column + 1, columns))

    placed = [chosen.randrange(blocks) for _ in range(count)]
    group = [chosen.randrange(count) if chosen.random() < 0.5 else index for index in range(count)]  # of counters
    touched = [
        (tuple(access() for _ in range(chosen.randint(0, 2))), tuple(access() for _ in range(chosen.randint(0, 1))))
        for _ in range(count)
    ]
    signals = [(group[index],) for index in range(count)]
    waits: list[list[CounterWait]] = [[] for _ in range(count)]
    for after in range(count):
        for before in range(after):
            reads, writes = touched[after]
            meets = any(
                a.meets(b)
                for mine, theirs in ((writes, (*touched[before][0], *touched[before][1])), (reads, touched[before][1]))
                for a in mine
                for b in theirs
            )
            if meets and placed[before] != placed[after] and chosen.random() < 0.95:
                least = sum(group[other] == group[before] for other in range(after))
                waits[after].append(CounterWait(group[before], least))
    tasks = [
        StepTask(kind="embed", layer=0, part=(index,), reads=reads, writes=writes, waits=tuple(waits[index]),
                 signals=signals[index])
        for index, (reads, writes) in enumerate(touched)
    ]  # fmt: skip
    lists = [[index for index in range(count) if placed[index] == block] for block in range(blocks)]
    inputs = frozenset("ab") if chosen.random() < 0.7 else frozenset("a")
    made = StepSchedule(
        tasks=tuple(tasks), blocks=tuple(map(tuple, lists)), counters=count, buffers=buffers, inputs=inputs
    )
    return changed(made, chosen) if chosen.random() < 0.5 else made


def changed(schedule: StepSchedule, chosen: random.Random) -> StepSchedule:
    """Return the schedule with one fault that may show or not."""
    tasks, blocks = list(schedule.tasks), [list(each) for each in schedule.blocks]
    at = chosen.randrange(len(tasks))
    task = tasks[at]
    match chosen.randrange(6):
        case 0:
            tasks[at] = replace(task, signals=())
        case 1:
            tasks[at] = replace(task, signals=task.signals * 2)
        case 2:
            tasks[at] = replace(task, waits=task.waits[1:])
        case 3 if task.waits:
            one = chosen.choice(task.waits)
            off = CounterWait(one.counter, max(0, one.least + chosen.choice((-1, 1))))
            tasks[at] = replace(task, waits=tuple(off if each == one else each for each in task.waits))
        case 4:
            chosen.shuffle(chosen.choice(blocks))
        case _:
            waits = (*task.waits, CounterWait(chosen.randrange(schedule.counters), 1))
            tasks[at] = replace(task, waits=waits)
    return replace(schedule, tasks=tuple(tasks), blocks=tuple(map(tuple, blocks)))
