"""A limit is claimed only where the machine is known, and is the roofline's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.calibration import Calibration, GemmRate, save
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline, step_limit, step_ops
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.machine import datasheet, device_name, driver_version, hardware_of
from tests.driving import ask, rig

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of calibrations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def calibrate(read: float) -> None:
    gemm = (GemmRate(64, 64, 64, "float32", 3e11),)
    save(Calibration(device=device_name(CPU), read=read, date="2026-01-01T00:00:00+00:00", gemm=gemm))


def test_a_cpu_is_known_by_its_calibration_only(store: Path) -> None:
    assert hardware_of(CPU) is None
    calibrate(read=3.5e10)
    hardware = hardware_of(CPU)
    assert hardware is not None
    assert (hardware.bandwidth, hardware.rate("float32")) == (3.5e10, 3e11)
    assert datasheet(CPU, "read") is None


def test_the_first_step_has_the_rooflines_limit(tiny_model: Callable[[str], Path], store: Path) -> None:
    """A prompt of ten, sampled once: the same number as adding up every op's cost."""
    calibrate(read=3.5e10)
    folder = tiny_model("llama")
    hardware = hardware_of(CPU)
    assert hardware is not None
    ops = step_ops(read_model_config(folder).spec, StepShape([10], [10], 1), dtype="float32")
    with rig(folder) as own:
        own.engine.add(ask("a", range(5, 15), max_tokens=4))
        own.engine.step()
        assert own.engine.headroom.limit == pytest.approx(step_limit(ops, hardware, "float32"))
        assert 0 < own.engine.headroom.share < 1  # type: ignore[operator]


def test_an_unknown_machine_claims_nothing(tiny_model: Callable[[str], Path], store: Path) -> None:
    with rig(tiny_model("llama")) as own:
        own.run(ask("a", range(5, 15), max_tokens=4))
        assert own.engine.headroom.share is None


@pytest.mark.timing
def test_a_limit_costs_microseconds(tiny_model: Callable[[str], Path]) -> None:
    model = Roofline(read_model_config(tiny_model("llama")).spec, find("H200"), "bfloat16")
    shape = StepShape(np.ones(256, np.int32), np.full(256, 1000, np.int32), 256)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        model.step_limit(shape)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-4  # 20 µs on a quiet machine


@pytest.mark.gpu
def test_a_gpu_has_a_name_and_a_driver() -> None:
    device = torch.device("cuda")
    assert device_name(device) == torch.cuda.get_device_name()
    assert driver_version(device)[0].isdigit()
