"""A GPU's figures where there is one, and none where there is not."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest

from ridgeline.serving.observed.gpus import Gpus


def test_other_devices_have_none() -> None:
    assert Gpus("cpu").read() == []


def test_a_machine_without_a_driver_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus("cuda:0").read() == []


class NotSupported(Exception):
    """As NVML's."""


def test_a_figure_that_a_gpu_does_not_tell_is_left_out_and_a_lost_gpu_leaves_all_out() -> None:
    """Of a part of a GPU, which no test can have: a driver that knows memory alone, and then is gone."""

    def refuse(*_: object) -> None:
        raise NotSupported

    memory = types.SimpleNamespace(used=1, total=2)
    driver = types.SimpleNamespace(
        NVMLError_NotSupported=NotSupported,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetIndex=lambda handle: 3,
        nvmlDeviceGetName=lambda handle: b"part",
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlDeviceGetUtilizationRates=refuse,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetTemperature=refuse,
    )
    gpus = Gpus("cpu")
    gpus._nvml, gpus._handles = driver, ["handle"]
    [found] = gpus.read()
    assert (found.index, found.name, found.memory_used, found.memory_total) == (3, "part", 1, 2)
    assert (found.utilization, found.power, found.temperature) == (None, None, None)

    del memory.used
    assert gpus.read() == []
    memory.used = 1
    assert gpus.read() == [], "it is not asked again"


@pytest.mark.gpu
def test_figures_are_those_of_nvidia_smi() -> None:
    fields = "name,memory.used,memory.total,power.draw,temperature.gpu"
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    name, used, total, power, temperature = subprocess.check_output(command, text=True).strip().split(", ")
    [found] = Gpus("cuda:0").read()
    assert re.fullmatch(re.escape(name), found.name)
    assert found.memory_total == pytest.approx(float(total) * 2**20, rel=0.01)
    assert found.memory_used == pytest.approx(float(used) * 2**20, abs=4 * 2**30)
    assert found.power == pytest.approx(float(power), rel=0.5)
    assert found.temperature == pytest.approx(float(temperature), abs=10)
    assert found.utilization is not None
    assert 0 <= found.utilization <= 1
