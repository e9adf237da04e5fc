"""Trees of drafts beside the network: inputs token by token, verification by a walk, and moves cell by cell."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.plan.step import Finish
from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.base.tree import NODES
from ridgeline.kernels.step.compact import STEP_COMPACT
from ridgeline.kernels.step.op import STEP_INPUTS
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.kernels.step.verify import STEP_VERIFY
from tests.covering import by_pairs
from tests.kernels.step.records import inputs_of, verify_of
from tests.kernels.trees import bits_of, depth_of, drawn_parents, signed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ["reference", *(one.name for one in STEP_VERIFY.implementations)]
VOCABULARY = 5


def run(op: Op, name: str, device: str):
    if name == "triton":
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def table(trees: list[tuple[int, ...]], nodes: int) -> Tensor:
    """The bits of each slot's nodes; a chain's behind those of its tree."""
    rows = [[*bits_of(parents), *((2 << node) - 1 for node in range(len(parents), nodes))] for parents in trees]
    return torch.tensor([[signed(bits) for bits in row] for row in rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_nodes_lie_in_their_order_and_stand_at_their_depth(name: str, seed: int, passed: bool, device: str) -> None:
    """Beside rows with tokens of their own, stopped rows and padding. passed: nodes of the rows ran in steps before."""
    draw = random.Random(seed)
    size, groups, drafts = draw.choice((1, 4, 16)), draw.choice((1, 3)), draw.choice((3, 11, NODES - 1))
    rows, slots = 6, 9
    trees = [drawn_parents(draw, 1 + drafts) for _ in range(slots)]
    before = [draw.randrange(1, 1 + drafts) if passed else 0 for _ in range(slots)]
    bases, stopped = [draw.randrange(90) for _ in range(slots)], [int(draw.random() < 0.2) for _ in range(slots)]
    stopped[-1] = 1
    counts = [draw.randrange(1, 2 + drafts - before[slot]) for slot in range(rows)]
    counts[1], counts[2] = 70, 0  # a chunk of a prompt, and a row without tokens
    starts, tokens = [sum(counts[:row]) for row in range(rows + 1)], sum(counts) + 5
    override = [-1] * tokens
    override[starts[1] : starts[2]] = [draw.randrange(50) for _ in range(70)]
    slots_R = torch.tensor(draw.sample(range(rows), rows), dtype=torch.int32)
    counted = {int(slot): row for row, slot in enumerate(slots_R.tolist())}
    before = [0 if counted.get(slot) == 1 else min(each, drafts) for slot, each in enumerate(before)]
    for slot, row in counted.items():
        before[slot] = min(before[slot], 1 + drafts - counts[row]) if row != 1 else 0
    drafts_SD = torch.randint(-1, 50, (slots, drafts), generator=torch.Generator().manual_seed(seed)).int()
    lengths, last = torch.tensor(bases) + torch.tensor(before), torch.arange(slots) + 1000
    tables_ASC = torch.randint(1, 999, (groups, slots, 300), generator=torch.Generator().manual_seed(seed)).int()
    given_ = (
        slots_R, torch.tensor(starts, dtype=torch.int32), torch.tensor(override, dtype=torch.int32), lengths, last,
        torch.tensor(stopped, dtype=torch.int32), tables_ASC, size, drafts_SD, table(trees, 1 + drafts),
        torch.tensor(bases) if passed else None,
    )  # fmt: skip
    got = run(STEP_INPUTS, name, device)(*inputs_of([x.to(device) if isinstance(x, Tensor) else x for x in given_]))

    ids, positions = [0] * tokens, [0] * tokens
    places, bits, bases_T = [[0] * tokens for _ in range(groups)], [1] * tokens, [0] * tokens
    for row, slot in enumerate(slots_R.tolist()):
        for i in range(counts[row]):
            t, node = starts[row] + i, before[slot] + i
            given_token = override[t] >= 0
            drafted = int(last[slot]) if node == 0 else max(0, int(drafts_SD[slot, min(node, drafts) - 1]))
            ids[t] = override[t] if given_token else drafted
            if stopped[slot]:
                continue
            index = int(lengths[slot]) + i
            for group, each in enumerate(tables_ASC):
                places[group][t] = int(each[slot, index // size]) * size + index % size
            positions[t] = bases_T[t] = index
            if not given_token:
                positions[t] = bases[slot] + depth_of(trees[slot], node)
                bits[t] = signed(bits_of(trees[slot])[node]) if node else 1
                bases_T[t] = bases[slot] if node else index
    stopped_T = torch.tensor([stopped[slot] for slot in slots_R.tolist()])
    for slot_stopped, row in zip(stopped_T.tolist(), range(rows), strict=True):
        if slot_stopped:
            for group in range(groups):
                places[group][starts[row] : starts[row + 1]] = [0] * counts[row]
    assert got.tree is not None
    found = (got.token_ids_T, got.positions_T, *got.places_AT, got.tree.bits_T, got.tree.base_T, got.tree.positions_T)
    for one, wanted in zip(found, (ids, positions, *places, bits, bases_T, positions), strict=True):
        assert one.tolist() == wanted
    plain = run(STEP_INPUTS, name, device)(
        *inputs_of([x.to(device) if isinstance(x, Tensor) else x for x in given_[:8]])
    )
    for field in ("kv_len_R", "last_R", "active_R", "live_T"):
        assert torch.equal(getattr(got, field), getattr(plain, field)), field


@dataclass
class Step:
    """The arguments of `step_verify`, and what it is to leave in them."""

    parents: list[tuple[int, ...]]  # by slot
    token_P: Tensor
    places_RN: Tensor
    num_logits_R: Tensor
    drafts_SD: Tensor
    slots_R: Tensor
    kv_len_R: Tensor
    active_R: Tensor
    stop_ids_SE: Tensor
    max_len_S: Tensor
    kv_len_S: Tensor
    last_token_S: Tensor
    stopped_S: Tensor
    output_count_SV: Tensor
    out_token_RK: Tensor
    out_finish_R: Tensor
    out_drafted_R: Tensor
    tree_SN: Tensor
    out_path_RK: Tensor

    @classmethod
    def drawn(cls, seed: int, nodes: int, *, chain: bool = False) -> Step:
        draw = random.Random(seed)
        rows = draw.randrange(1, 9)
        slots, dummy = rows + 2, rows + 1
        wide = 0.0 if chain else draw.choice((0.2, 0.6, 1.0))
        parents = [drawn_parents(draw, nodes, wide) for _ in range(slots)]
        columns = 1 + max(depth_of(each, node) for each in parents for node in range(nodes))
        slots_R = [slot if draw.random() < 0.9 else dummy for slot in draw.sample(range(dummy), rows)]
        active = [slot != dummy and draw.random() < 0.9 for slot in slots_R]
        counts = [draw.choice((0, 1, nodes, nodes, draw.randrange(nodes + 1))) for _ in range(rows)]
        token_P = [draw.randrange(-1 if draw.random() < 0.1 else 0, VOCABULARY) for _ in range(rows * nodes + 3)]
        places_RN = torch.tensor(draw.sample(range(len(token_P)), rows * nodes), dtype=torch.int32).view(rows, nodes)
        drafts = [[draw.randrange(-1, VOCABULARY) for _ in range(nodes - 1)] for _ in range(slots)]
        for row, slot in enumerate(slots_R):
            for node in range(1, nodes):  # mostly what was drawn at the parent
                if draw.random() < 0.85:
                    drafts[slot][node - 1] = token_P[places_RN[row, parents[slot][node]]]
        before = [draw.randrange(30) for _ in range(rows)]
        lengths = [length + count if on else 1 for length, count, on in zip(before, counts, active, strict=True)]
        integers, bytes_ = {"dtype": torch.int32}, {"dtype": torch.int8}
        stops = [[draw.choice((-1, -1, -1, 0, 4)) for _ in range(3)] for _ in range(slots)]
        running = {slot for slot, on in zip(slots_R, active, strict=True) if on}
        return cls(
            parents,
            torch.tensor(token_P),
            places_RN,
            torch.tensor(counts, **integers),
            torch.tensor(drafts, **integers).view(slots, nodes - 1),
            torch.tensor(slots_R, **integers),
            torch.tensor(lengths),
            torch.tensor(active),
            torch.tensor(stops),
            torch.tensor([draw.randrange(4, 80) for _ in range(slots)]),
            torch.arange(slots) + 50,
            torch.arange(slots) + 70,
            torch.tensor([int(slot not in running) for slot in range(slots)], **integers),
            torch.zeros(slots, VOCABULARY, **integers),
            torch.full((rows, columns), 77, **integers),
            torch.full((rows,), 77, **bytes_),
            torch.full((rows,), 77, **bytes_),
            table(parents, nodes),
            torch.full((rows, columns), 77, **integers),
        )  # fmt: skip

    def on(self, device: str) -> Step:
        moved = {f.name: getattr(self, f.name).to(device, copy=True) for f in fields(self) if f.name != "parents"}
        return replace(self, **moved)

    @property
    def arguments(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)[1:]]

    def walked(self) -> Step:
        """The same behind a walk from each root."""
        done = self.on("cpu")
        columns = done.out_token_RK.shape[1]
        for row, slot in enumerate(self.slots_R.tolist()):
            count = int(self.num_logits_R[row]) if self.active_R[row] else 0
            before = int(self.kv_len_R[row]) - int(self.num_logits_R[row])
            emitted, path, finish, node = [], [], Finish.NONE, 0
            while count and finish == Finish.NONE:
                token = int(self.token_P[self.places_RN[row, node]])
                if token < 0:
                    finish = Finish.NAN
                    break
                emitted.append(token)
                path.append(node)
                if token in self.stop_ids_SE[slot].tolist():
                    finish = Finish.STOP
                elif before + 1 + len(emitted) >= self.max_len_S[slot]:
                    finish = Finish.LENGTH
                children = [n for n in range(1, count) if self.parents[slot][n] == node]
                node = next((n for n in children if int(self.drafts_SD[slot, n - 1]) == token), -1)
                if node < 0:
                    break
            rest = [-1] * (columns - len(emitted))
            done.out_token_RK[row], done.out_path_RK[row] = torch.tensor([emitted + rest, path + rest])
            done.out_finish_R[row] = finish
            done.out_drafted_R[row] = sum(draft >= 0 for draft in self.drafts_SD[slot, : max(0, count - 1)].tolist())
            if self.active_R[row] and self.kv_len_R[row]:
                done.kv_len_S[slot] = before + (max(1, len(emitted)) if count else 0)
            if emitted:
                done.last_token_S[slot] = emitted[-1]
            if finish:
                done.stopped_S[slot] = 1
            for token in emitted:
                done.output_count_SV[slot, token] += 1
        return done


def check(name: str, step: Step, device: str) -> Step:
    done, wanted = step.on(device), step.walked()
    run(STEP_VERIFY, name, device)(*verify_of(done.arguments))
    for field in fields(Step)[1:]:
        assert getattr(done, field.name).tolist() == getattr(wanted, field.name).tolist(), field.name
    return wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("nodes", [1, 4, 16, 33, NODES])
@pytest.mark.parametrize("name", NAMES)
def test_rows_emit_along_the_path_whose_drafts_were_drawn(name: str, nodes: int, seed: int, device: str) -> None:
    check(name, Step.drawn(seed, nodes), device)


def test_the_steps_see_every_end_and_paths_that_leave_nodes_out() -> None:
    finishes, jumps, twins = set(), 0, 0
    for seed in range(12):
        for nodes in (16, 33, NODES):
            step = check("reference", Step.drawn(seed, nodes), "cpu")
            finishes |= set(step.out_finish_R.tolist())
            column_K = torch.arange(step.out_path_RK.shape[1])
            jumps += int((step.out_path_RK > column_K).sum())
            for slot in step.slots_R.tolist():
                children = list(zip(step.parents[slot][1:], step.drafts_SD[slot].tolist(), strict=True))
                twins += len(children) - len(set(children))
    assert finishes == {Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.NAN}
    assert jumps > 50
    assert twins > 50


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, NODES))
def test_any_tree_is_walked(seed: int, nodes: int) -> None:
    check("reference", Step.drawn(seed, nodes), "cpu")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 17))
def test_a_chain_is_verified_as_without_a_tree(name: str, seed: int, nodes: int) -> None:
    step = Step.drawn(seed, nodes, chain=True)
    with_tree, without = step.on("cpu"), step.on("cpu")
    run(STEP_VERIFY, name, "cpu")(*verify_of(with_tree.arguments))
    run(STEP_VERIFY, name, "cpu")(*verify_of(without.arguments[:-2]))
    for field in fields(Step)[1:-1]:
        assert torch.equal(getattr(with_tree, field.name), getattr(without, field.name)), field.name
    emitted_RK = with_tree.out_token_RK >= 0
    column_RK = torch.arange(emitted_RK.shape[1]).expand_as(emitted_RK)
    assert torch.equal(with_tree.out_path_RK.long(), torch.where(emitted_RK, column_RK, -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype", "shape", "by_token"),
    by_pairs(
        ["reference", *(one.name for one in STEP_COMPACT.implementations)],
        [torch.int64, torch.uint8, torch.int32],
        [(1, 3, 1), (4, 32, 2), (16, 600, 2)],
        [False, True],
    ),
    ids=str,
)
def test_the_cells_of_a_path_move_together_and_no_others(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], by_token: bool, device: str
) -> None:
    size, width, layers = shape
    draw, rows, columns, parts, heads = random.Random(width + size), 5, 9, 2, 3
    nodes = [sorted(draw.sample(range(1, NODES), draw.randrange(columns))) for _ in range(rows)]
    nodes[1] = [1, 2, 3, 4, 5]  # a chain, which stays where it is
    nodes[2] = list(range(2, 10))  # all of them move onto each other's places
    nodes[3] = None  # a row that emitted nothing
    path = [[-1] * columns if each is None else [0, *each, *[-1] * (columns - 1 - len(each))] for each in nodes]
    before, counts = [draw.randrange(70) for _ in range(rows)], [NODES] * rows
    entries = -(-(70 + NODES) // size)
    table_SC = torch.full((rows + 1, entries + 3), 10**9, dtype=torch.int32)[:, :entries]
    slots = draw.sample(range(rows + 1), rows)
    ids = 1 + torch.randperm(rows * entries, generator=torch.Generator().manual_seed(size)).view(rows, entries).int()
    table_SC[torch.tensor(slots)] = ids
    step = 1 + rows * entries + 2  # ids from layer to layer
    inner = (size, heads) if by_token else (heads, size)
    units = torch.randint(0, 120, (layers * step, parts, *inner, width)).to(dtype)
    units = units.transpose(2, 3) if by_token else units
    want = units.clone()
    for row, each in enumerate(nodes):
        for k, node in enumerate([0, *(each or [])]):
            (from_block, from_at), (to_block, to_at) = (divmod(before[row] + place, size) for place in (node, k))
            for layer in range(layers):
                source, target = (int(table_SC[slots[row], block]) + layer * step for block in (from_block, to_block))
                want[target, :, :, to_at] = units[source, :, :, from_at]
    given_ = [
        torch.tensor(slots, dtype=torch.int32), torch.tensor(before) + NODES, torch.tensor(counts, dtype=torch.int32),
        torch.tensor(path, dtype=torch.int32),
    ]  # fmt: skip
    moved = units.to(device, copy=True)
    of_group = GroupUnits(moved, table_SC.to(device), size, layers, step)
    run(STEP_COMPACT, name, device)(*(x.to(device) for x in given_), of_group)
    assert torch.equal(moved.cpu(), want)
    assert not torch.equal(want, units)
