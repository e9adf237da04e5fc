"""Rungs for AMD GPUs: each file run by the emulator beside float64, and its machine code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import Emulated, build
from ridgeline.kernels.cuda.predict import WARP
from ridgeline.kernels.gemm.ladder.hip import clang, compile_hip
from ridgeline.kernels.gemm.ladder.other_gpus import (
    AMD_RUNGS,
    OTHER_RUNGS,
    OtherRung,
    table,
)
from ridgeline.kernels.gemm.ladder.rungs import Rung
from tests.kernels.compiled import amd_facts, known
from tests.kernels.gemm.test_ladder import PAGE, found_wrong, product, ragged

needs_emulator = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler")
needs_clang = pytest.mark.skipif(not clang(), reason="no clang for AMD GPUs; on Debian: apt-get install clang-22")
amd_rung = pytest.mark.parametrize("each", AMD_RUNGS, ids=lambda each: each.rung.name)
few_amd_rungs = pytest.mark.parametrize(
    "each",
    [
        each if each.rung.name in ("mfma_buffers", "wmma") else pytest.param(each, marks=pytest.mark.thorough)
        for each in AMD_RUNGS
    ],
    ids=lambda each: each.rung.name,
)
kernels: dict[str, Emulated] = {}


def emulated(each: OtherRung, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    rung = each.rung
    if rung.name not in kernels:
        kernels[rung.name] = build(rung.source, "gemm", rung.defines, tmp_path_factory.mktemp("rungs"))
    return kernels[rung.name]


@needs_emulator
@few_amd_rungs
def test_amd_rungs_are_right_at_any_shape(each: OtherRung, tmp_path_factory: pytest.TempPathFactory) -> None:
    kernel, rung = emulated(each, tmp_path_factory), each.rung
    rows, columns = rung.tile
    assert product(kernel, rung, rows, 2 * columns, 3 * rung.depth)[0] == ""
    assert product(kernel, rung, *ragged(rung), order=2)[0] == ""
    assert product(kernel, rung, 1, rung.multiple, rung.multiple, order=1)[0] == ""


@needs_emulator
@few_amd_rungs
def test_amd_rungs_read_lds_as_predicted(each: OtherRung, tmp_path_factory: pytest.TempPathFactory) -> None:
    (rows, columns), steps = each.rung.tile, 4
    counted = product(emulated(each, tmp_path_factory), each.rung, rows, columns, steps * each.rung.depth)[1]
    buffers = each.rung.depth == 32  # with two of them, a step of zeros is stored at the end
    ahead = (rows + columns) * each.rung.depth * 2 / 128 if buffers else 0
    groups = rows * columns * each.rung.depth * steps / WARP
    assert (counted.wavefronts - ahead) / groups == each.shared
    assert (counted.wavefronts == counted.accesses) == (each.rung.name != "mfma_16")


BROKEN = {
    "a buffer that is filled while it is read": (
        "mfma_buffers",
        "b_held);\n    __syncthreads();\n  }",
        "b_held);\n  }",
    ),
    "the wrong buffer": ("mfma_buffers", "a_tile[(step + 1) % 2], a_held", "a_tile[step % 2], a_held"),
    "sums that are stored in the order of rows": ("wmma", "lane % 2 * 8 + lane % 16 / 2", "lane % 16"),
    "halves of a wave that bring different rows": (
        "wmma",
        "i * 16 + lane % 16, d)",
        "i * 16 + lane % 16, d ^ lane / 16)",
    ),
    "halves of A and B that differ": ("mfma", "b_part[j].at[half]", "b_part[j].at[half ^ 1]"),
}


@needs_emulator
@pytest.mark.thorough
@pytest.mark.parametrize("fault", BROKEN)
def test_an_amd_rung_with_a_fault_is_found_wrong(fault: str, tmp_path: Path) -> None:
    name, old, new = BROKEN[fault]
    rung = next(each.rung for each in AMD_RUNGS if each.rung.name == name)
    assert found_wrong(rung, old, new, tmp_path)


@needs_clang
@amd_rung
def test_amd_machine_code_has_the_instructions_and_spills_nothing(each: OtherRung) -> None:
    rung = each.rung
    code = amd_facts(rung.source.read_text(), rung.arch, rung.defines)
    assert [needed for needed in rung.needs if not code.number(needed)] == []
    assert code.spills == 0
    assert code.numbers["vgpr_count"] <= rung.registers
    assert code.numbers["wavefront_size"] == int(rung.defines["WARP_LANES"])
    tiles = (rung.tile[0] + rung.tile[1]) * 2 * (rung.depth + 8 if rung.depth == 64 else 2 * rung.depth)
    assert code.numbers["group_segment_fixed_size"] == tiles, "the compiler keeps nothing else in LDS"
    steps = {"v_mfma_f32_32x32x8_bf16": 8, "v_mfma_f32_16x16x16_bf16": 16, "v_wmma_f32_16x16x16_bf16": 16}
    sums = {"v_mfma_f32_32x32x8_bf16": 4, "v_mfma_f32_16x16x16_bf16": 16, "v_wmma_f32_16x16x16_bf16": 8}
    wanted = rung.depth // steps[rung.needs[0]] * sums[rung.needs[0]]
    assert code.number(rung.needs[0]) == wanted, "the products of one stage, and no others"


@needs_clang
@pytest.mark.parametrize("rung", [
    pytest.param(each.rung, marks=[pytest.mark.thorough] if known(
        each.rung.source.read_text(), each.rung.arch, each.rung.defines
    ) else []) for each in AMD_RUNGS if each.rung.name == "mfma_buffers"
])  # fmt: skip
def test_with_two_buffers_loads_are_on_their_way_while_the_matrix_cores_work(rung: Rung) -> None:
    code = compile_hip(rung.source.read_text(), rung.arch, rung.defines)
    names = {"global_load_dwordx4": "L", "v_mfma": "M", "s_waitcnt vmcnt": "W", "ds_write_b128": "S"}
    order = "".join(names[word] for word in re.findall("|".join(names), code[code.index("s_barrier") :]))
    assert re.search("L{4}M{8,}WS{4}|M{8,}WS{4}M*L{4}", order), "the loop, which the compiler may turn"


def test_each_file_says_what_it_is() -> None:
    for source in {each.rung.source for each in OTHER_RUNGS}:
        told = re.findall(r"^// (Idea|FLOPs|Bytes|Limit|Next) ", source.read_text(), re.MULTILINE)
        assert told == ["Idea", "FLOPs", "Bytes", "Limit", "Next"]
    here = {each.rung.source for each in OTHER_RUNGS}
    folders = {source.parent for source in here}
    assert here == {file for folder in folders for file in folder.iterdir() if file.suffix in (".hip", ".cu")}


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text()
