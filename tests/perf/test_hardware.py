"""Devices are found by many names; calibrations are kept whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.calibration import Calibration, GemmRate, load, path_for, save, store_folder
from ridgeline.perf.hardware import KNOWN, find, from_device_name

MEASURED = Calibration(
    device="NVIDIA H200",
    read=4.4e12,
    date="2026-11-20",
    gemm=(GemmRate(64, 64, 64, "bfloat16", 1e12), GemmRate(8192, 8192, 8192, "bfloat16", 7e14)),
    host_to_device=55e9,
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx_5090", "RTX-5090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v5 lite", "TPU-v5e"),
        ("cpu", "CPU"),
    ],
)
def test_names(name: str, wanted: str) -> None:
    assert from_device_name(name).name == wanted


@pytest.mark.parametrize("name", ["", "NVIDIA", "H20", "H2000", "-"])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"known: A100-40GB, .*CPU"):
        find(name)


def test_the_table_is_plausible() -> None:
    for hardware in KNOWN:
        assert find(hardware.name) is hardware
        assert 15e9 < hardware.memory < 300e9
        assert all(1e10 < rate < 1e16 for rate in hardware.matrix.values())
        if hardware.name != "CPU":
            assert 50 < hardware.ridge("bfloat16") < 600, hardware.name


def test_measured_rates_replace_the_datasheet() -> None:
    h200 = find("H200")
    assert (h200.bandwidth, h200.attained().bandwidth) == (4.8e12, 4.42e12)
    mine = h200.with_calibration(MEASURED)
    assert (mine.bandwidth, mine.rate("bfloat16"), mine.rate("int8"), mine.pcie) == (
        4.4e12,
        7e14,
        h200.rate("int8"),
        55e9,
    )


def test_a_calibration_survives_the_store(tmp_path: Path) -> None:
    assert load(MEASURED.device, tmp_path) is None
    save(MEASURED, tmp_path)
    assert load(MEASURED.device, tmp_path) == MEASURED
    assert [p.name for p in tmp_path.iterdir()] == ["nvidia-h200.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"device": "NVIDIA H200", "date": "", "read": -1}', '{"device": "x", "date": "", "read": "1"}'],
)
def test_a_damaged_calibration_is_one_sentence(tmp_path: Path, text: str) -> None:
    path_for("NVIDIA H200", tmp_path).write_text(text)
    with pytest.raises(InvalidConfig, match="calibrate again"):
        load("NVIDIA H200", tmp_path)


def test_the_store_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_folder() == tmp_path / "ridgeline" / "calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store_folder() == Path.home() / ".cache" / "ridgeline" / "calibration"
