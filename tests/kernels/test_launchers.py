"""Modules that launch kernels are made with them, where Triton makes one for each signature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.nvidia import driver

from ridgeline.kernels.base.launchers import Launchers


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a driver as Triton 3.6's was asked to make."""
    asked = list[Any]()
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    monkeypatch.setattr(driver, "CudaUtils", lambda: asked.append("calls"))
    monkeypatch.setattr(driver, "CudaLauncher", lambda source, metadata: asked.append((source, metadata.num_warps)))
    return asked


def test_a_launcher_is_made_as_the_first_launch_would_make_it(made: list[Any]) -> None:
    launchers = Launchers()
    launchers.prepare_calls()
    launchers.prepare("source", {"num_warps": 4})
    assert made == ["calls", ("source", 4)]


def test_nothing_is_made_where_all_kernels_share_a_launcher(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(driver, "make_launcher")
    launchers = Launchers()
    launchers.prepare_calls()
    launchers.prepare("source", {"num_warps": 4})
    assert made == []


def test_what_cannot_be_made_is_tried_once(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Any, metadata: SimpleNamespace) -> None:
        made.append(source)
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(driver, "CudaLauncher", fail)
    launchers = Launchers()
    for name in ("first", "second"):
        launchers.prepare(name, {"num_warps": 4})
    assert made == ["first"]
