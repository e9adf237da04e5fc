"""Rungs that become HIP by a table of words: what changes, and their machine code where a clang for AMD GPUs is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import build
from ridgeline.kernels.gemm.ladder.hip import ARCHS, TABLE, changes, clang, compile_hip, diff, hip_rungs, in_hip
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung
from tests.kernels.compiled import AmdFacts, amd_facts, clang_here, hip_kernels, source_of, stored
from tests.kernels.gemm.test_ladder import PAGE, product, ragged

needs_clang = pytest.mark.skipif(not clang(), reason="no clang for AMD GPUs; on Debian: apt-get install clang-22")
RUNG = {rung.name: rung for rung in RUNGS}


@needs_clang
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rung", list(hip_rungs()), ids=lambda rung: rung.name)
def test_a_rung_in_hip_spills_nothing(rung: Rung, arch: str) -> None:
    code = amd_facts(in_hip(rung), arch, {})
    assert code.spills == 0
    assert code.number("s_barrier") == (2 if rung.depth else 0)
    if rung.number >= 4:
        assert code.number("ds_read_b128", "ds_load_b128") > 0
    if rung.number >= 5:
        assert code.number("global_load_dwordx4", "global_load_b128") > 0
    if rung.name == "coalesced":  # a wave of 64 lanes adds in six steps, and one of 32 in five
        assert code.number("ds_bpermute_b32") == {"gfx942": 6, "gfx1100": 5}[arch]


@needs_clang
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "text", "arch", "defines"), list(hip_kernels()), ids=lambda x: str(x)[:9])
def test_what_is_kept_of_a_kernel_in_hip_is_what_it_compiles_to(
    name: str, text: str, arch: str, defines: Mapping[str, str]
) -> None:
    line = stored().get(source_of(text, arch, defines))
    if line is None or line["compiler"] != clang_here():
        pytest.skip(f"nothing is kept of {name} and this clang; python -m tests.kernels.compiled keeps it")
    assert AmdFacts.of(compile_hip(text, arch, defines)) == amd_facts(text, arch, defines)


@pytest.mark.dealt
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
