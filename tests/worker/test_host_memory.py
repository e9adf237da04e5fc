"""Blocks on their way to the host's memory and back: each comes with the bytes that it went with, whatever its group,
and whatever else is on the way."""

from __future__ import annotations

import mmap
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.plan.step import MoveBlocks, Moves
from ridgeline.core.specs.cache_layout import CacheGroup
from ridgeline.core.specs.host_layout import LEAST_STAGING, MOST_STAGING, HostLayout, staging_bytes
from ridgeline.core.specs.state import KVSpec
from ridgeline.worker.host_memory import HostMemory, Staging
from ridgeline.worker.state.buffer import StateMemory
from tests.engine.layouts import GROUPS, Groups, layout_of


class NoEvent:
    """Work that is done when it is queued."""

    def __init__(self, *, enable_timing: bool = False) -> None: ...
    def elapsed_time(self, other: NoEvent) -> float:
        return 1.0

    def record(self) -> None: ...
    def wait(self) -> None: ...

    def query(self) -> bool:
        return random.random() < 0.5


class Moved:
    """A cache, the host's memory behind it, and what each of their blocks should hold."""

    def __init__(self, groups: Groups, device: str, staging_bytes: int, *, shared: bool = False) -> None:
        self.layout = layout_of(groups, 2, 12)
        self.memory = StateMemory(self.layout, torch.device(device))
        self.below = HostLayout(self.layout, 9)
        self.own = HostMemory(self.memory, self.below, staging_bytes, shared=shared)
        self.draw = random.Random(3)
        self.pages = list(range(1, 12))
        self.held: dict[tuple[int, int], bytes] = {}

    def block(self, group: int) -> int:
        page = self.draw.choice(self.pages[group :: len(self.layout.groups)])
        return self.layout.block_id(group, page, self.draw.randrange(self.layout.blocks_per_page(group)))

    def place(self, group: int) -> int:
        page = self.draw.choice(list(range(1, 9))[group :: len(self.layout.groups)])
        return self.below.block_id(group, page, self.draw.randrange(self.below.blocks_per_page(group)))

    def units(self, group: int, block: int) -> torch.Tensor:
        layers = range(len(self.layout.groups[group].layers))
        step = self.layout.layer_step(group)
        places = torch.tensor([block + layer * step for layer in layers], device=self.memory.device)
        return self.memory.units[group].index_select(0, places)

    def write(self, group: int, block: int, value: int) -> None:
        for layer in range(len(self.layout.groups[group].layers)):
            self.memory.units[group][block + layer * self.layout.layer_step(group)].view(torch.uint8).fill_(value)

    def run(self, moves: Moves | None) -> None:
        self.own.prepare(SimpleNamespace(plan=SimpleNamespace(id=0, moves=moves)))  # type: ignore[arg-type]


def many_plans(moved: Moved) -> None:
    """Plans that save, overwrite and load, several of them in flight."""
    expected: dict[tuple[int, int], int] = {}
    checks: list[tuple[int, int, int, torch.Tensor]] = []
    value = 0
    for _ in range(40):
        saves, loads, taken = [], [], set()
        for g in range(len(moved.layout.groups)):
            pairs = {moved.place(g): moved.block(g) for _ in range(moved.draw.randrange(4))}
            for block in pairs.values():
                value = value % 250 + 1
                moved.write(g, block, value)
            for place, block in pairs.items():
                expected[g, place] = int(moved.units(g, block).view(torch.uint8)[0, 0])
            if pairs:
                saves.append(MoveBlocks(g, tuple(pairs.values()), tuple(pairs)))
            known = [place for group, place in expected if group == g]
            into = {moved.block(g): moved.draw.choice(known) for _ in range(3 if known else 0)}
            if into:
                loads.append(MoveBlocks(g, tuple(into), tuple(into.values())))
                taken |= {(g, block, expected[g, place]) for block, place in into.items()}
        awaited = moved.draw.random() < 0.5
        moved.run(Moves(tuple(saves), tuple(loads), awaited))
        if not awaited:
            moved.run(None)  # the next plan
        checks += [(g, block, want, moved.units(g, block)) for g, block, want in taken]
        for g, block, _ in taken:
            moved.write(g, block, 255)  # rows may write there at once
    assert len(checks) > 50
    for g, block, want, units in checks:
        assert (units.view(torch.uint8) == want).all(), f"group {g}, block {block}"


@pytest.mark.parametrize("groups", GROUPS)
def test_blocks_come_back_as_they_went(groups: Groups) -> None:
    many_plans(Moved(groups, "cpu", 1 << 20))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("staging_bytes", [1, 5000, 1 << 20])
def test_the_way_through_staging_memory_is_the_same_where_streams_do_all_at_once(
    groups: Groups, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's code with streams and events that do nothing. It shows which bytes go where, and no order."""
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    moved = Moved(groups, "cpu", 1)
    moved.own.use_streams(staging_bytes)
    many_plans(moved)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("staging_bytes", [1, 5000, 1 << 20])
def test_blocks_come_back_over_a_stream_of_their_own(groups: Groups, staging_bytes: int) -> None:
    moved = Moved(groups, "cuda", staging_bytes)
    assert moved.own.bytes.is_pinned()
    assert moved.own.bytes_per_second() > 0
    many_plans(moved)


def seen_from_outside(moved: Moved) -> None:
    """Another process sees the memory's bytes through its descriptor, and its changes come back."""
    assert moved.own.descriptor is not None
    seen = mmap.mmap(moved.own.descriptor, moved.below.num_bytes)
    many_plans(moved)
    moved.own.settle()
    assert seen[:] == moved.own.bytes.numpy().tobytes()
    seen[3:5] = b"ab"
    assert bytes(moved.own.bytes[3:5].numpy()) == b"ab"


def test_shared_memory_is_seen_from_outside() -> None:
    seen_from_outside(Moved(GROUPS[2], "cpu", 1 << 20, shared=True))


@pytest.mark.gpu
def test_shared_memory_is_page_locked_too() -> None:
    moved = Moved(GROUPS[2], "cuda", 1 << 20, shared=True)
    assert moved.own.bytes.is_pinned()
    seen_from_outside(moved)


def test_a_copy_is_timed() -> None:
    assert Moved(GROUPS[2], "cpu", 1 << 20).own.bytes_per_second() > 0


def test_memory_that_the_host_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no")

    layout = layout_of(GROUPS[0], 2, 4)
    memory = StateMemory(layout, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(InvalidConfig, match=r"did not give .* GiB of memory for kv_offloading_size; lower it"):
        HostMemory(memory, HostLayout(layout, 3), 1)


def test_a_size_below_one_page_is_named() -> None:
    layout = layout_of(GROUPS[0], 2, 4)
    with pytest.raises(InvalidConfig, match=r"kv_offloading_size is 0\.000000 GiB .*raise it"):
        HostLayout.within(layout, layout.page_bytes - 1)
    assert HostLayout.within(layout, 3 * layout.page_bytes).num_pages == 4


@pytest.mark.parametrize(("tokens", "staged"), [(1, LEAST_STAGING), (2048, 2048 * 131_072), (1 << 20, MOST_STAGING)])
def test_blocks_of_a_whole_step_may_be_on_their_way(tokens: int, staged: int) -> None:
    """Of Llama-3.1-8B, which caches 128 KiB a token."""
    groups = (CacheGroup(spec=KVSpec(num_kv_heads=8, head_dim=128), layers=tuple(range(32))),)
    assert staging_bytes(groups, "bfloat16", tokens) == staged
    sizes = StepSizes(device_type="cuda", itemsize=2, max_tokens=tokens, max_seqs=1, longest=1)
    assert Staging(groups).reserve(sizes).held == 2 * staged
