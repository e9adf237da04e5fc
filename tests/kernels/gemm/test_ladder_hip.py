"""Rungs that become HIP by a table of words: what changes, and their machine code where a clang for AMD GPUs is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import build
from ridgeline.kernels.gemm.ladder.hip import ARCHS, TABLE, assembly, changes, clang, diff, hip_rungs, in_hip
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung
from tests.kernels.gemm.test_ladder import PAGE, product, ragged

needs_clang = pytest.mark.skipif(not clang(), reason="no clang for AMD GPUs; on Debian: apt-get install clang-22")
RUNG = {rung.name: rung for rung in RUNGS}


def counted(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@pytest.mark.few(6)
@needs_clang
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rung", list(hip_rungs()), ids=lambda rung: rung.name)
def test_a_rung_in_hip_spills_nothing(rung: Rung, arch: str, tmp_path: Path) -> None:
    code = assembly(rung, arch, tmp_path)
    assert re.findall(r"\.[sv]gpr_spill_count: +(\d+)", code) == ["0", "0"]
    assert re.findall(r"\.private_segment_fixed_size: +(\d+)", code) == ["0"]
    assert counted(r"\bs_barrier\b", code) == (2 if rung.depth else 0)
    if rung.number >= 4:
        assert counted(r"ds_(read|load)_b128", code) > 0
    if rung.number >= 5:
        assert counted(r"global_load_(dwordx4|b128)", code) > 0


@needs_clang
def test_a_wave_of_64_lanes_adds_in_six_steps_and_one_of_32_in_five(tmp_path: Path) -> None:
    steps = {arch: counted("ds_bpermute_b32", assembly(RUNG["coalesced"], arch, tmp_path)) for arch in ARCHS}
    assert steps == {"gfx942": 6, "gfx1100": 5}


@pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("lanes", [64, pytest.param(32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rung", [
    each if each.name == "coalesced" else pytest.param(each, marks=pytest.mark.thorough) for each in hip_rungs()
], ids=lambda rung: rung.name)  # fmt: skip
def test_a_rung_in_hip_is_right_in_waves_of_either_size(rung: Rung, lanes: int, tmp_path: Path) -> None:
    source = tmp_path / f"{rung.source.stem}.hip"
    source.write_text(in_hip(rung))
    if rung.name == "coalesced":  # a wave for each dot product
        rung = replace(rung, block=(lanes, 256 // lanes), tile=(1, 256 // lanes))
    kernel = build(source, "gemm", {"WARP_LANES": str(lanes)}, tmp_path)
    assert product(kernel, rung, *ragged(rung), order=2)[0] == ""


def test_no_word_of_cuda_is_left_and_every_word_of_the_table_is_used() -> None:
    texts = [rung.source.read_text() for rung in hip_rungs()]
    assert all(any(word in text for text in texts) for word in TABLE)
    assert not any(re.search(r"_sync\(|cp_async", in_hip(rung)) for rung in hip_rungs())
    assert len(changes(RUNG["coalesced"])) == 6


def test_the_page_has_the_changes() -> None:
    assert "\n".join(diff()) in PAGE.read_text()
