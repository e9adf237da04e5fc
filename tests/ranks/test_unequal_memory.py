"""Ranks with unequal memory take the smallest cache, and the shortest context, that any of them has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import _agreed
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.settings.config import LLMConfig
from ridgeline.ranks import recruits
from ridgeline.worker.memory import CPU_SHARE, MemoryReport, weight_bytes
from tests.driving import ask, rig
from tests.engine.layouts import layout_of
from tests.parallel.threads import ThreadAxis, on_ranks
from tests.ranks.stages import meshes
from tests.ranks.test_group import check, group_of

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_the_smallest_cache_wins() -> None:
    layout = layout_of(((None, 2),), 4, 1)

    def agree(axis: ThreadAxis) -> MemoryReport:
        pages, longest = [(50, 64), (30, 90), (40, 48)][axis.rank]
        report = MemoryReport(
            weights=10 + axis.rank,
            activations=1,
            kv_cache=pages * layout.page_bytes,
            layout=replace(layout, num_pages=pages),
            max_model_len=longest,
            sizes=StepSizes(device_type="cpu", itemsize=4, max_tokens=8, max_seqs=1, longest=90),
        )
        return _agreed(report, axis)

    for rank, report in enumerate(on_ranks(3, agree)):
        assert (report.layout.num_pages, report.max_model_len) == (30, 48)
        assert report.kv_cache == 30 * layout.page_bytes
        assert report.weights == 10 + rank


TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
RICH, BLOCKS = 1 << 36, 24  # bytes, more than any cache here takes; and what the other rank has room for


@pytest.fixture
def poor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, dict[str, int]], None]:
    """`poor(model, rank, settings)`: the rank has memory for its weights, a step and BLOCKS blocks, and others for
    everything. Each notes in tmp_path how many blocks it would have alone."""

    def arrange(model: Path, rank: int, settings: dict[str, int]) -> None:
        config = LLMConfig(
            model=model, dtype="float32", device="cpu", block_size=4, max_num_seqs=4, max_num_batched_tokens=32,
            **settings,
        )  # fmt: skip
        choices = choose(config, torch.device("cpu"), meshes(config)[rank])
        memory = choices.memory(weights=0, loaded=True, longest=64)
        needed = memory.activations + BLOCKS * memory.layout.page_bytes
        needed += (
            weight_bytes(choices.mesh.stage_of(choices.model.spec), dtype_bytes=4, positions=1) // choices.mesh.tp.size
        )
        free = [RICH] * config.ranks
        free[rank] = int(needed * config.ranks / CPU_SHARE)
        monkeypatch.setattr(recruits, "MODULE", "tests.ranks.unequal_rank")
        monkeypatch.setenv("RANK_MEMORY", " ".join(map(str, free)))
        monkeypatch.setenv("RANK_NOTES", str(tmp_path))

    return arrange


@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        (1, {TP: 2}),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [(0, {TP: 2}), (0, {PP: 2}), (1, {PP: 2}), (1, {CP: 2}), (2, {TP: 2, PP: 2})]
        ),
    ],
)
def test_processes_go_by_the_one_with_least_memory(
    rank: int,
    settings: dict[str, int],
    poor: Callable[[Path, int, dict[str, int]], None],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """In their blocks, and in the longest context, beyond which a request is refused."""
    folder = tiny_model("llama")
    poor(folder, rank, settings)
    with rig(folder, **settings) as own:
        alone = [int((tmp_path / str(number)).read_text()) for number in range(len(group_of(own)._members))]
        assert alone[rank] < min(alone[:rank] + alone[rank + 1 :])
        ready: list[Any] = [each.ready for each in group_of(own)._members]
        assert {each.num_pages for each in ready} == {alone[rank]} == {own.engine.layout.num_pages}
        [longest] = {each.max_model_len for each in ready}
        assert own.engine.config.max_model_len == longest
        assert 64 < longest < 256, "memory does not bound the context"
        with pytest.raises(InvalidRequest, match=str(longest)):
            own.engine.add(ask("too long", [5] * longest, max_tokens=1))
        with rig(folder, kv_cache_memory=1 << 19) as one:
            check(own, one)


def test_a_context_that_one_rank_has_no_room_for_is_one_sentence(
    poor: Callable[[Path, int, dict[str, int]], None], tiny_model: Callable[[str], Path]
) -> None:
    poor(tiny_model("llama"), 1, {TP: 2})
    with (
        pytest.raises(InvalidConfig, match=r"^the KV cache has [^\n]+ lower max_model_len to \d+\.$"),
        rig(tiny_model("llama"), max_model_len=256, **{TP: 2}),
    ):
        pass
