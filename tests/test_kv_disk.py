"""The disk below the host's memory: engines that start again find what earlier ones computed, with the same tokens, and
a disk that lies or is full costs time alone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.cache.disk import DiskBelow
from tests.driving import Rig, ask, rig
from tests.test_host_tier import FAMILIES, PROMPTS, SIZE, room


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
    for _ in range(1000):
        if not own.engine.rest():
            return
        disk_of(own).wait_for_writes(0.1)
    raise AssertionError("blocks do not reach the disk")


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


def divided(folder: Path) -> dict[str, Any]:
    """Return the settings of two ranks, each with half of the memory."""
    return {"tensor_parallel_size": 2, "kv_cache_memory": room(folder) // 2}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.thorough)])
def test_ranks_that_start_again_find_their_parts(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(family)
    with rig(folder, max_model_len=60) as own:
        expected = asked(own)
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        assert asked(own) == expected
        written(own)
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        assert asked(own) == expected
        assert disk_of(own).counts.hit >= len(PROMPTS) * 30
        assert not own.errors
    with served(folder, tmp_path / "kv") as own:
        assert asked(own) == expected
        assert disk_of(own).counts.hit == 0, "a block of two parts is none of one device"


def test_a_damaged_part_is_computed_again_by_all_ranks(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        before = asked(own)
        written(own)
        size = sum(own.engine.scheduler.cache.tier.layout.block_bytes)  # type: ignore[union-attr]  # of one rank
    for file in (tmp_path / "kv").glob("*.seg"):
        content = bytearray(file.read_bytes())
        used = len(content.rstrip(b"\0"))
        for place in range(used - size // 2, used - 40 * size, -2 * size):  # the second rank's parts alone
            content[place] ^= 1
        file.write_bytes(content)
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        assert asked(own) == before
        assert disk_of(own).store.figures().corrupt
        assert not own.errors


def test_ranks_of_which_one_was_killed_leave_nothing_wrong(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        before = asked(own)
    shutil.rmtree(tmp_path / "kv")
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        own.add(*(ask(f"killed {n}", prompt) for n, prompt in enumerate(PROMPTS)))
        for _ in range(6):
            own.step()
        own.worker._members[1]._process.kill()  # type: ignore[attr-defined]  # writes are under way
        with pytest.raises(DeviceLost):
            own.run()
    with served(folder, tmp_path / "kv", **divided(folder)) as own:
        assert asked(own) == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_disk": "x"}, "kv_disk='x': blocks come to the disk by way of the host's memory; set kv_offloading_size"),
        ({"kv_disk_ttl": 5.0}, "kv_disk_ttl=5.0: it is about that directory; set kv_disk"),
        ({"kv_disk": "x", **SIZE, "kv_disk_eviction": "fifo"}, "kv_disk_eviction must be lru, lfu or cost, got 'fifo'"),
        ({"kv_disk": "x", **SIZE, "pipeline_parallel_size": 2}, "ranks of tensor_parallel_size alone"),
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
