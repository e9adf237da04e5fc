"""The work that begins before torch is imported: for one GPU alone, and never for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.settings.config import LLMConfig
from ridgeline.worker import early
from ridgeline.worker.early import CompilerProcess, Early


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A machine with a GPU, cores and an empty cache, whose contexts are counted by the number of their device, and
    whose processes wait."""
    made = list[int]()
    monkeypatch.setattr(early, "_gpus", lambda: True)
    monkeypatch.setattr(early, "find_spec", lambda name: object())
    monkeypatch.setattr(early, "_make_context", made.append)
    monkeypatch.setattr(early, "processes_worthwhile", lambda: 2)
    monkeypatch.setattr(early, "CHILD", (sys.executable, "-c", "input()"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return made


def begun(**settings: Any) -> int:
    """Return the number of processes that begin with these settings."""
    found = Early(LLMConfig(**settings))
    count, processes = len(found.processes), [each.process for each in found.processes]
    found.end()
    assert not found.processes
    assert all(process.poll() is not None for process in processes)
    return count


def test_a_context_and_processes_are_begun_for_an_empty_cache(on_a_gpu: list[int], tmp_path: Path) -> None:
    assert begun() == 2
    assert begun(device="cuda:1", enforce_eager=True) == 0
    (tmp_path / "ridgeline-0123").touch()
    assert begun() == 0, "another model's kernels are there, so this start is not the first"
    assert on_a_gpu == [0, 1, 0]


def test_kernels_compiled_ahead_need_no_processes(on_a_gpu: list[int], tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    (ahead / "ridgeline-0123").touch()
    assert begun(kernel_cache=str(ahead)) == 0


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"tensor_parallel_size": 2}])
def test_nothing_is_begun_for_other_engines(settings: dict[str, Any], on_a_gpu: list[int]) -> None:
    assert begun(**settings) == 0
    assert on_a_gpu == []


def test_a_process_ends_with_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "CHILD", (sys.executable, "-c", "import sys; sys.stdin.read(); print('over')"))
    child = CompilerProcess()
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait(30) == 0
    assert child.printed() == "over"
    child.end()


def test_beginning_imports_nothing_that_takes_time() -> None:
    command = "import sys, ridgeline.worker.early; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True, text=True)
    assert "torch" not in told.stdout
    assert "triton" not in told.stdout
