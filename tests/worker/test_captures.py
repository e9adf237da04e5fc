"""Graphs that are captured once an engine is ready: behind a step that needed one, and while there is no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ridgeline.worker import graphs
from ridgeline.worker.graphs import CAPTURED_FEATURES, Graph, Graphs
from tests.driving import Rig, ask, rig
from tests.test_speculation import Replayed
from tests.test_token_masks import Alternating

LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 20}


class Late(Replayed):
    """A bucket on a CPU whose capture runs its segments on padding, as a capture does, and is counted."""

    is_captured = False
    breaks = False

    def capture(self, pool: Any) -> None:
        step = self._own_step()
        self._segments.forward(step)
        for features in CAPTURED_FEATURES:
            step.features = features
            self._segments.sample(step)
        if self.breaks:
            raise RuntimeError("CUDA out of memory")
        self.is_captured = True

    def forward(self, step: Any) -> None:
        if self.is_captured:
            super().forward(step)
        else:
            self._step = None
            Graph.forward(self, step)


@contextmanager
def late(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[Rig, Graphs]]:
    """An engine none of whose buckets is captured."""
    monkeypatch.setattr(graphs, "Graph", Late)
    monkeypatch.setattr(graphs, "behind_the_current_stream", lambda device: nullcontext())
    with rig(folder, **LIMITS, **options) as own:
        found = Graphs(own.runner.segments, 6, 32)
        monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: None)
        found.capture_later()
        own.runner.launch.graphs = found
        yield own, found


def requests() -> list[Any]:
    """Prompts in chunks, sampled and greedy rows, and one with masks."""
    return [
        *(ask(f"greedy {n}", [n + 1, 2 * n + 1, *range(9 * n)], max_tokens=3 + n) for n in range(6)),
        ask("drawn", [5, 6, 7], max_tokens=8, temperature=0.9, top_p=0.8, seed=4),
        ask("masked", [5, 6, 7, 8], max_tokens=8, mask=Alternating()),
        ask("scored", [9, 8, 7], max_tokens=5, logprobs=2, prompt_logprobs=1),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_no_token_depends_on_when_graphs_are_captured(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(family)
    with rig(folder, **LIMITS) as own:
        want = own.run(*requests())
    with late(folder, monkeypatch) as (own, found):
        before = found.left
        got = own.run(*requests())
        until = time.monotonic() + 20
        while True:  # the last capture may be under way behind the last result
            left, ran = found.left, {graph for graph in found._graphs.values() if graph.is_captured}
            if left == before - len(ran) or time.monotonic() > until:
                break
            time.sleep(0.01)
        assert 3 < len(ran) < len(found._graphs)
        assert left == before - len(ran)
        assert sum(graph.replays for graph in ran) > 0  # type: ignore[attr-defined]
        while own.engine.rest():
            pass
        assert found.left == 0
        assert all(graph.is_captured for graph in found._graphs.values())
        again = own.run(*requests())
    assert not own.errors
    for outcomes in (got, again):
        for name, outcome in want.items():
            assert outcomes[name].tokens == outcome.tokens, name


def test_a_step_captures_no_bucket_but_its_own(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with late(tiny_model("llama"), monkeypatch) as (own, found):
        counts = list[int]()
        submit = own.engine._worker.submit

        def counted(plan: Any) -> None:
            counts.append(found.left)
            submit(plan)

        monkeypatch.setattr(own.engine._worker, "submit", counted)
        own.run(*requests())
    assert all(0 <= before - after <= 1 for before, after in pairwise(counts))


def test_a_capture_that_fails_ends_captures_and_no_request(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    with rig(folder, **LIMITS) as own:
        want = own.run(*requests())
    monkeypatch.setattr(Late, "breaks", True)
    with late(folder, monkeypatch) as (own, found):
        got = own.run(*requests())
        assert found.left == 2, "the largest steps, which no graph holds"
        while own.engine.rest():
            pass
        assert not any(graph.is_captured for graph in found._graphs.values())
    assert not own.errors
    assert {name: got[name].tokens for name in want} == {name: each.tokens for name, each in want.items()}


@pytest.mark.gpu
def test_graphs_on_a_gpu_change_no_token_whenever_they_are_captured(tiny_model: Callable[[str], Path]) -> None:
    options = {**LIMITS, "device": "cuda", "kv_cache_memory": 1 << 26, "debug_checks": False}
    with rig(tiny_model("qwen3"), capture_at_start=True, **options) as own:
        want = own.run(*requests())
        assert own.runner.pieces_left == 0
    with rig(tiny_model("qwen3"), **options) as own:
        assert own.runner.pieces_left > 0
        got = own.run(*requests())
        while own.engine.rest():
            pass
        assert own.runner.pieces_left == 0
        own.engine.forget_prefixes()
        again = own.run(*requests())
        assert not own.errors
    for outcomes in (got, again):
        assert {name: outcomes[name].tokens for name in want} == {name: each.tokens for name, each in want.items()}
