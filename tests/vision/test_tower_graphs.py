"""Runs of a tower in graphs: what fills a run up changes no picture, and graphs are used when they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.layers.encoder.grids import Grid
from ridgeline.layers.encoder.laid import LaidAnew
from ridgeline.layers.encoder.tower import Tower
from ridgeline.worker import tower_graphs
from ridgeline.worker.pictures import TowerMemory
from ridgeline.worker.tower_graphs import TowerGraph, TowerGraphs, captured_patches, fillers
from tests.driving import Rig, rig
from tests.vision import tiny

TinyModel = Callable[[str], Path]
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava", "gemma3")
# whose towers have something between layers, learned queries, codes, or patches that no other sees
WITHOUT = ("minicpmv4_6", "blip-2", "instructblip", "phi4_multimodal", "chameleon", "chameleon_swin")
CPU = torch.device("cpu")


class Late(TowerGraph):
    """A graph on a CPU, whose replays run op by op and are counted."""

    replays = 0

    def capture(self, pool: Any) -> None:
        self._run()
        self.is_captured = True

    def vectors(self) -> torch.Tensor:
        self.replays += self.is_captured
        return self._run()


@contextmanager
def late(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[Rig, TowerGraphs]]:
    """An engine whose tower has graphs, none of them captured."""
    monkeypatch.setattr(tower_graphs, "TowerGraph", Late)
    monkeypatch.setattr(tower_graphs, "behind_the_current_stream", lambda device: nullcontext())
    monkeypatch.setattr(tower_graphs, "SIZES", (16, 64, 256))
    monkeypatch.setattr(tower_graphs, "PATCHES", 256)
    with rig(folder, **options) as own:
        part = own.runner.inserted.pictures
        assert part is not None
        part.capture(None, later=True)
        assert part.graphs is not None
        yield own, part.graphs


def views_of(spec: TowerSpec) -> list[Grid]:
    """Views that a tower can see: of its one size, or of several."""
    if tower_graphs.alike(spec):
        assert spec.grid is not None
        return [Grid(1, spec.grid.side, spec.grid.side)] * 3
    m = spec.merge
    return [Grid(1, 2 * m, 3 * m), Grid(1, m, m), Grid(1, 3 * m, m)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_fills_a_run_up_changes_no_vector(
    family: str, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late(tiny_vision(family), monkeypatch) as (own, found), torch.inference_mode():
        tower = own.runner.decoder.tower
        assert isinstance(tower, Tower)
        grids = views_of(tower.spec)
        patches_TX = torch.randn(sum(grid.patches for grid in grids), tower.spec.patch_width, dtype=tower.dtype)
        want = tower(patches_TX, grids)
        for graph in found.graphs.values():
            graph._patches_TX.fill_(3)
        got = found.run(patches_TX, grids)
        assert got is not None
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=1e-5)  # products of other sizes may add up in another order
        first = got.clone()
        for graph in found.graphs.values():
            graph._patches_TX[len(patches_TX) :] = -7
        assert torch.equal(found.run(patches_TX, grids), first)
        assert found.run(patches_TX[:0].new_zeros(4096, tower.spec.patch_width), [Grid(1, 64, 64)]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_before_and_behind_captures(
    family: str, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (tiny.drawn(family, number) for number in range(2))
    parts = ([5, 6, 7], a, [8, 9], b), (b, [7, 8]), ([9], a)
    with late(tiny_vision(family), monkeypatch, encoder_cache_bytes=0) as (own, found):
        for again in range(2):
            if again:
                assert found.left < len(found.graphs)  # those that steps missed
                while own.engine.rest():
                    pass
                assert found.left == 0
            asked = [tiny.asked(family, f"{again} {n}", *each) for n, each in enumerate(parts)]
            outcomes = own.run(*asked)
            own.engine.forget_prefixes()
            for each, request in zip(parts, asked, strict=True):
                shown = [part for part in each if isinstance(part, np.ndarray)]
                assert outcomes[request.id].tokens == tiny.by_transformers(family, request, shown), request.id
        assert sum(graph.replays for graph in found.graphs.values()) > 0  # type: ignore[attr-defined]
        assert not own.errors


def test_a_capture_that_fails_ends_captures_and_no_request(
    tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Late, pool: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Late, "capture", breaks)
    picture = tiny.drawn("qwen3_vl", 0)
    with late(tiny_vision("qwen3_vl"), monkeypatch) as (own, found):
        request = tiny.asked("qwen3_vl", "x", [5, 6], picture)
        assert own.run(request)["x"].tokens == tiny.by_transformers("qwen3_vl", request, [picture])
        while own.engine.rest():
            pass
        assert found.left == 0
        assert not any(graph.is_captured for graph in found.graphs.values())


@pytest.mark.parametrize("stale", [False, True])
def test_a_graph_with_other_bits_than_its_run_is_not_used(
    stale: bool, tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale one does not read the patches that it is given."""

    class Fake:
        work: Any
        found: Any

        def replay(self) -> None:
            if not stale:
                self.found.copy_(self.work())

    def record(graph: Any, pool: Any, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        graph.work, graph.found = work, work().clone()
        return graph.found  # type: ignore[no-any-return]

    for name, stand_in in (("record", record), ("borrowed", lambda tensor: tensor)):
        monkeypatch.setattr(tower_graphs, name, stand_in)
    with late(tiny_vision("qwen3_vl"), monkeypatch) as (own, _), torch.inference_mode():
        tower = own.runner.decoder.tower
        assert isinstance(tower, Tower)
        memory_TX = torch.randn(64, tower.spec.patch_width)
        kept_TX, graph = memory_TX.clone(), TowerGraph(tower, memory_TX, list(fillers(64, 2)))
        monkeypatch.setattr(tower_graphs.torch.cuda, "CUDAGraph", Fake)
        if stale:
            with pytest.raises(RuntimeError, match="64 patches has other bits"):
                graph.capture(None)
        else:
            graph.capture(None)
        assert graph.is_captured != stale
        assert torch.equal(memory_TX, kept_TX)
        assert torch.equal(graph.vectors(), tower.run(memory_TX, graph._laid.laid))


def test_a_tower_that_an_adapter_changes_replays_no_graph(
    tiny_vision: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late(tiny_vision("qwen3_vl"), monkeypatch) as (own, found):
        part, runs = own.runner.inserted.pictures, list[bool]()
        assert part is not None
        monkeypatch.setattr(found, "run", lambda *_: runs.append(True))
        [inserted] = tiny.asked("qwen3_vl", "x", tiny.drawn("qwen3_vl", 0), [5]).inserted
        assert inserted.shown is not None
        with torch.inference_mode():
            part.encode({"x": inserted.shown}, {}, adapted=True)
            assert not runs
            part.encode({"x": inserted.shown}, {})
            assert runs


def test_views_that_a_graph_has_no_room_for_are_left_out(tiny_vision: TinyModel) -> None:
    with rig(tiny_vision("qwen2_5_vl")) as own:
        tower = own.runner.decoder.tower
        assert isinstance(tower, Tower)
        anew = LaidAnew(tower.spec, list(fillers(256, 2)), 4, CPU)
        assert anew.load([Grid(1, 16, 16)])
        assert anew.whole.start_R1.tolist() == [0, 256]
        assert not anew.load([Grid(1, 2, 2)] * 64)  # more views
        assert not anew.load([Grid(1, 8, 8)])  # fewer patches
        assert anew.whole.start_R1.tolist() == [0, 256]


def test_what_fills_up_has_as_many_patches_as_are_left() -> None:
    for merge in (1, 2, 3):
        for squares in (0, 1, 31, 33, 500):
            views = list(fillers(squares * merge**2, merge))
            assert sum(view.patches for view in views) == squares * merge**2
            assert all(view.rows == merge for view in views)
            assert all(view.patches <= tower_graphs.FILLED for view in views)


def test_memory_is_planned_for_graphs_on_a_gpu(tiny_vision: TinyModel) -> None:
    with rig(tiny_vision("qwen3_vl")) as own:
        spec = own.runner.decoder.spec.tower
        assert spec is not None
        sizes = {"itemsize": 4, "max_tokens": 64, "max_seqs": 2, "longest": 64}
        gpu, cpu = (TowerMemory(spec).reserve(StepSizes(device_type=each, **sizes)) for each in ("cuda", "cpu"))
        assert gpu.held - cpu.held >= captured_patches(spec) * spec.patch_width * 4
        assert gpu.passing == cpu.passing


@pytest.mark.gpu
@pytest.mark.parametrize("family", [each for each in tiny.FAMILIES if each not in WITHOUT])
def test_graphs_on_a_gpu_have_the_bits_of_runs_op_by_op(family: str, tiny_vision: TinyModel) -> None:
    with rig(tiny_vision(family), device="cuda", block_size=16) as own, torch.inference_mode():
        part, tower = own.runner.inserted.pictures, own.runner.decoder.tower
        assert isinstance(tower, Tower)
        assert part is not None
        found = part.graphs
        assert found is not None
        grids, device = views_of(tower.spec), own.runner.device
        count = sum(grid.patches for grid in grids)
        draws = [torch.randn(count, tower.spec.patch_width, device=device).to(tower.dtype) for _ in range(2)]
        want = [found.run(each, grids).clone() for each in draws]  # type: ignore[union-attr]
        assert found.missed is not None
        while found.left:
            found.rest()
        assert all(graph.is_captured for graph in found.graphs.values())
        for each, vectors in zip(draws, want, strict=True):
            assert torch.equal(found.run(each, grids), vectors)  # type: ignore[arg-type]
        plain = tower(draws[0], grids)
        assert torch.allclose(want[0].float(), plain.float(), atol=0.05 if tower.dtype == torch.bfloat16 else 1e-3)
