"""The disk below the host's memory: engines that start again find what earlier ones computed, with the same tokens, and
a disk that lies or is full costs time alone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.cache.disk import DiskBelow
from ridgeline.engine.price import Price
from ridgeline.engine.side_by_side import Engines
from tests.driving import Rig, ask, disturbed, rig
from tests.test_host_tier import AXES, FAMILIES, PROMPTS, SIZE, room

ONE_AXIS = [AXES[0], *(pytest.param(axis, marks=pytest.mark.thorough) for axis in AXES[1:])]


def asked(own: Rig, salt: str = "") -> list[list[int]]:
    """Return the tokens of all prompts."""
    found = []
    for n, prompt in enumerate(PROMPTS):
        name = f"{len(own.outcomes)} {n}"
        found.append(own.run(replace(ask(name, prompt), cache_salt=salt)).pop(name).tokens)
    return found


def disk_of(own: Rig) -> DiskBelow:
    tier = own.engine.scheduler.cache.tier
    assert tier is not None
    assert tier.disk is not None
    return tier.disk


def disks_of(own: Rig) -> list[DiskBelow]:
    """Return the disks of engines side by side."""
    assert isinstance(own.engine, Engines)
    tiers = [engine.scheduler.cache.tier for engine in own.engine.engines]
    return [tier.disk for tier in tiers if tier is not None and tier.disk is not None]


@contextmanager
def served(folder: Path, disk: Path, **settings: Any) -> Iterator[Rig]:
    settings = {
        "kv_cache_memory": room(folder),
        "max_model_len": 60,
        "kv_disk": disk,
        "kv_disk_size": 1 / 32,
        **SIZE,
        **settings,
    }
    with rig(folder, **settings) as own:
        yield own


def written(own: Rig) -> None:
    """Let all that was computed reach the disk."""
    disks = disks_of(own) if isinstance(own.engine, Engines) else [disk_of(own)]
    for _ in range(1000):
        if not own.engine.rest():
            return
        for disk in disks:
            disk.wait_for_writes(0.1)
    raise AssertionError("blocks do not reach the disk")


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_that_starts_again_finds_what_was_computed(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(family)
    with served(folder, tmp_path / "kv") as own:
        before = asked(own)
    with served(folder, tmp_path / "kv") as own:
        after = asked(own)
        counts = disk_of(own).counts
        assert counts.hit >= len(PROMPTS) * 30  # of each prompt's 40 tokens
        assert own.engine.scheduler.figures().hit_tokens >= counts.hit
        assert not own.errors
    assert after == before


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_that_starts_again_on_a_gpu_finds_what_was_computed(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tokens are dear here: a GPU computes those of a tiny model in less time than it reads them."""
    folder, found = tiny_model(family), []
    for again in (False, True):
        with served(folder, tmp_path / "kv", device="cuda", dtype="float32") as own:
            tier = own.engine.scheduler.cache.tier
            assert tier is not None
            tier.price = Price()
            found.append(asked(own))
            assert not own.errors
            assert disk_of(own).counts.hit >= again * len(PROMPTS) * 30  # of each prompt's 40 tokens
    assert found[0] == found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_every_kind_go_through_all_tiers_behind_preemption_forks_and_restarts(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prompts fork, requests give way and leave, and the engine starts again; the tokens are those of each alone."""
    folder = tiny_model(family)
    forks = {f"{n} {k}": (*PROMPTS[n], *PROMPTS[k][:5]) for n in range(3) for k in (3, 4)}
    with rig(folder, max_model_len=60) as own:
        expected = {name: own.run(ask(name, prompt)).pop(name).tokens for name, prompt in forks.items()}
    for again in (False, True):
        with served(folder, tmp_path / "kv") as own:
            tier = own.engine.scheduler.cache.tier
            assert tier is not None
            tier.price = Price()  # tokens are dear, so that blocks are loaded
            for turn in range(2):
                own.add(*(ask(f"{turn} {name}", prompt) for name, prompt in forks.items()))
                left = disturbed(own, Random(7 + turn), gives_way=0.4, leaves=0.03)
                found = {name: own.outcomes[f"{turn} {name}"].tokens for name in forks if f"{turn} {name}" not in left}
                assert found == {name: expected[name] for name in found}
                assert len(found) > len(forks) // 2
                written(own)
            assert not own.errors
            assert tier.counts.loaded_blocks > 0
            assert (disk_of(own).counts.hit > 0) == again


def test_a_disk_that_is_believed_to_be_slow_is_tried_in_time(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens are cheap, the first belief forbids every read, and so would for ever."""
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv") as own:
        asked(own)
    monkeypatch.setattr("ridgeline.engine.cache.disk.FIRST_RATE", 1.0)
    monkeypatch.setattr("ridgeline.engine.cache.disk.RECOVERS", 1e3)
    with served(folder, tmp_path / "kv") as own:
        asked(own)
        counts = disk_of(own).counts
        assert counts.forgone > 0
        assert counts.hit > 0
        assert counts.forgone + counts.hit >= len(PROMPTS) * 30


def test_a_process_that_was_killed_leaves_what_it_had_written(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A copy of the directory is what a killed process leaves."""
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv") as own:
        before = asked(own)
        written(own)
        shutil.copytree(tmp_path / "kv", tmp_path / "left")
    with served(folder, tmp_path / "left") as own:
        assert asked(own) == before
        assert disk_of(own).counts.hit >= len(PROMPTS) * 30


def test_tenants_and_other_weights_find_nothing_of_each_other(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv") as own:
        asked(own, salt="a")
    with served(folder, tmp_path / "kv") as own:
        asked(own, salt="b")
        assert disk_of(own).counts.hit == 0
        asked(own, salt="a")
        assert disk_of(own).counts.hit > 0
    (folder / "config.json").touch()
    with served(folder, tmp_path / "kv") as own:
        asked(own, salt="a")
        assert disk_of(own).counts.hit == 0


def test_what_was_forgotten_is_not_found_on_the_disk(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with served(tiny_model("llama"), tmp_path / "kv") as own:
        before = asked(own)
        written(own)
        own.engine.forget_prefixes()
        assert asked(own) == before
        assert disk_of(own).counts.hit == 0


def test_damaged_blocks_are_computed_again(
    tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv") as own:
        before = asked(own)
    for file in (tmp_path / "kv").glob("*.seg"):
        content = bytearray(file.read_bytes())
        used = len(content.rstrip(b"\0"))
        for place in range(max(0, used - (64 << 10)), used, 256):  # the last blocks, of more than a prompt
            content[place] ^= 1
        file.write_bytes(content)
    with served(folder, tmp_path / "kv") as own, caplog.at_level(logging.WARNING):
        assert asked(own) == before
        figures = disk_of(own).store.figures()
    assert figures.corrupt
    assert sum("is damaged; it is computed again" in record.message for record in caplog.records) <= 1


def divided(folder: Path, axis: str = AXES[0], **settings: Any) -> dict[str, Any]:
    """Return the settings of two ranks, each with half of the memory: ranks that divide tokens have whole states."""
    return {axis: 2, "kv_cache_memory": room(folder) // (1 if axis == AXES[2] else 2), **settings}


def check_parts(folder: Path, disk: Path, axis: str) -> None:
    """Two ranks find after a restart what they had, and another division finds nothing of it."""
    with rig(folder, max_model_len=60) as own:
        expected = asked(own)
    for again in (False, True):
        with served(folder, disk, **divided(folder, axis)) as own:
            assert asked(own) == expected
            if not again:
                written(own)
            assert (disk_of(own).counts.hit >= len(PROMPTS) * 30) == again
            assert not own.errors
    with served(folder, disk) as own:
        assert asked(own) == expected
        assert disk_of(own).counts.hit == 0, "a block of two parts is none of one device"


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [*AXES[:2], pytest.param(AXES[2], marks=pytest.mark.thorough)])
def test_ranks_that_start_again_find_their_parts(axis: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    check_parts(tiny_model("llama"), tmp_path / "kv", axis)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "axis"),
    [(family, axis) for family in FAMILIES[1:] for axis in AXES if (family, axis) != ("deepseek_v3", AXES[2])],
)
def test_ranks_find_parts_of_every_kind_of_state(
    family: str, axis: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    check_parts(tiny_model(family), tmp_path / "kv", axis)


@pytest.mark.dealt
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.thorough)])
def test_ranks_with_requests_of_their_own_find_what_each_of_them_had(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each has whole blocks, so it does not matter which of them computed one."""
    folder = tiny_model(family)
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with rig(folder, max_model_len=60) as own:
        expected = asked(own)
    hits = []
    for again in (False, True):
        with served(folder, tmp_path / "kv", **settings) as own:
            assert asked(own) == expected
            if not again:
                written(own)
            disks = disks_of(own)
            assert len(disks) == 2
            hits.append([disk.counts.hit for disk in disks])
            assert not own.errors
            below = own.engine.scheduler.figures().below
            assert below is not None
            assert below["disk_bytes"] == max(disk.store.figures().bytes for disk in disks)  # of one directory
    assert sum(hits[1]) >= len(PROMPTS) * 30


@pytest.mark.thorough
def test_ranks_with_requests_of_their_own_that_are_killed_leave_what_they_had_written(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, settings = tiny_model("qwen3_moe"), {"data_parallel_size": 2, "enable_expert_parallel": True}
    with served(folder, tmp_path / "kv", **settings) as own:
        before = asked(own)
        written(own)
        own.add(*(ask(f"killed {n}", prompt[::-1]) for n, prompt in enumerate(PROMPTS)))
        own.step()
        own.engine._worker._members[1]._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(DeviceLost):
            own.run()
    with served(folder, tmp_path / "kv", **settings) as own:
        assert asked(own) == before
        assert sum(disk.counts.hit for disk in disks_of(own)) >= len(PROMPTS) * 30


@pytest.mark.dealt
@pytest.mark.parametrize("axis", ONE_AXIS)
def test_a_damaged_part_is_computed_again_by_all_ranks(
    axis: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv", **divided(folder, axis)) as own:
        before = asked(own)
        written(own)
        size = len(disk_of(own)._memory.octets(0, 1)[1])  # of one rank's part
    for file in (tmp_path / "kv").glob("*.seg"):
        content = bytearray(file.read_bytes())
        used = len(content.rstrip(b"\0"))
        for place in range(used - size // 2, used - 40 * size, -2 * size):  # the second rank's parts alone
            content[place] ^= 1
        file.write_bytes(content)
    with served(folder, tmp_path / "kv", **divided(folder, axis)) as own:
        assert asked(own) == before
        assert disk_of(own).store.figures().corrupt
        assert not own.errors


@pytest.mark.dealt
@pytest.mark.parametrize("axis", ONE_AXIS)
def test_ranks_of_which_one_was_killed_leave_nothing_wrong(
    axis: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv", **divided(folder, axis)) as own:
        before = asked(own)
    shutil.rmtree(tmp_path / "kv")
    with served(folder, tmp_path / "kv", **divided(folder, axis)) as own:
        own.add(*(ask(f"killed {n}", prompt) for n, prompt in enumerate(PROMPTS)))
        for _ in range(6):
            own.step()
        own.worker._members[1]._process.kill()  # type: ignore[attr-defined]  # writes are under way
        with pytest.raises(DeviceLost):
            own.run()
    with served(folder, tmp_path / "kv", **divided(folder, axis)) as own:
        assert asked(own) == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_disk": "x"}, "kv_disk='x': blocks come to the disk by way of the host's memory; set kv_offloading_size"),
        ({"kv_disk_ttl": 5.0}, "kv_disk_ttl=5.0: it is about that directory; set kv_disk"),
        ({"kv_disk": "x", **SIZE, "kv_disk_eviction": "fifo"}, "kv_disk_eviction must be lru, lfu or cost, got 'fifo'"),
        ({"kv_disk": "x", **SIZE, "kv_disk_size": -1}, "kv_disk_size must not be negative"),
    ],
)
def test_settings_that_cannot_be_are_told_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLMConfig(**settings)


def test_a_directory_that_others_may_read_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(InvalidConfig, match="open"), served(tiny_model("llama"), tmp_path / "open"):
        pass
