"""The rungs of CUTLASS and the CuTe DSL: their machine code, where nvcc, CUTLASS' headers and the DSL are."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ridgeline.kernels.cuda.compile import NoCudaCompiler, machine_code
from ridgeline.kernels.gemm.ladder import cute_rung, cutlass_rungs
from ridgeline.kernels.gemm.ladder.cute_rung import cute_cubin, has_dsl, kernel_name
from ridgeline.kernels.gemm.ladder.cutlass_rungs import CUTLASS_RUNGS, SOURCE, ArgumentFiller, CutlassRung, headers
from ridgeline.kernels.gemm.ladder.rungs import RUNGS


def can_compile() -> bool:
    try:
        return headers().is_dir() and shutil.which("nvcc") is not None
    except NoCudaCompiler:
        return False


@pytest.mark.thorough
@pytest.mark.skipif(not can_compile(), reason='no nvcc, or no headers: pip install "ridgeline[cutlass]" has the latter')
@pytest.mark.parametrize("rung", CUTLASS_RUNGS, ids=lambda rung: rung.name)
def test_the_templates_become_the_instructions_they_promise(rung: CutlassRung, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="its package has the disassembler")
    rung.write(tmp_path)
    code_file, library = rung.files(tmp_path)
    code = machine_code(code_file.read_bytes())
    assert [needed for needed in rung.needs if not code.has(needed)] == []
    assert code.stack == 0, "registers are spilled"
    assert code.registers <= rung.registers
    filler = ArgumentFiller(library, recording_driver(tmp_path))
    assert filler.launch.block == 384
    assert filler.launch.shared <= 227 << 10
    assert f"{filler.launch.size:#x}" in parameter_sizes(code_file.read_bytes())
    m, n, k, (a, b, c, bias) = 3000, 2304, 1024, (1 << 20, 2 << 20, 3 << 20, 4 << 20)
    argument = bytes(filler.argument((a, b, c, bias), (m, n, k), 132))
    blocks = tuple(filler.launch.grid)
    assert blocks[2] == 1
    assert blocks[0] * blocks[1] == 132, "as many as multiprocessors: there are 24 x 9 tiles"
    assert blocks[0] % 2 == 0, "whole clusters"
    maps = [Recorded.from_buffer_copy(argument, at.start()) for at in re.finditer(re.escape(MARK), argument)]
    assert [(each.address, *each.sizes, *each.strides) for each in maps] == [
        (a, k, m, 1, 2 * k, 0), (b, k, n, 1, 2 * k, 0), (c, n, m, 1, 2 * n, 0),
    ]  # fmt: skip
    assert [tuple(each.box) for each in maps[:2]] == [(64, 128, 1), (64, 128, 1)], "half of B for each of a cluster"
    assert (bias.to_bytes(8, "little") in argument) == bool(rung.steps)
    with pytest.raises(ValueError, match="multiples of 8, got 16 and 12"):
        filler.argument((a, b, c, bias), (8, 16, 12), 132)


MARK = b"recorded"
RECORDS = """
#include <string.h>
int cuTensorMapEncodeTiled(unsigned long long *map, int type, unsigned rank, void *address,
                           const unsigned long long *sizes, const unsigned long long *strides, const unsigned *box) {
  memcpy(map, "recorded", 8);
  map[1] = (unsigned long long)address;
  memcpy(map + 2, sizes, 24);
  memcpy(map + 5, strides, 16);
  memcpy(map + 7, box, 12);
  return rank != 3;
}
"""


class Recorded(ctypes.Structure):
    """The record of a call in the place of a descriptor of TMA."""

    _fields_ = (
        ("mark", ctypes.c_char * 8), ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 3),
        ("strides", ctypes.c_uint64 * 2), ("box", ctypes.c_uint32 * 3),
    )  # fmt: skip


def recording_driver(folder: Path) -> str:
    """Return a library in place of libcuda that writes what it was asked for."""
    source, library = folder / "records.c", folder / "librecords.so"
    source.write_text(RECORDS)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return str(library)


@pytest.mark.skipif(not has_dsl(), reason='no CuTe DSL; pip install "ridgeline[cutlass]" has it')
def test_the_dsl_makes_warp_roles_and_waits_for_no_single_product() -> None:
    pytest.importorskip("triton", reason="its package has the disassembler")
    code = cute_cubin()
    made = machine_code(code)
    assert [needed for needed in cute_rung.NEEDS if not made.has(needed)] == []
    assert made.stack == 0, "registers are spilled"
    assert made.registers <= cute_rung.REGISTERS
    products = [line for line in made.listing.splitlines() if " HGMMA." in line]
    assert sum("gsb0" in line for line in products) == len(products) / 4
    assert {hex(size) for size in (128, 8, 24, 16)} <= parameter_sizes(code), "what LoadedCute passes"
    assert kernel_name(code).startswith("kernel_cutlass_kernel")


def parameter_sizes(code: bytes) -> set[str]:
    """Return the sizes of parameters that a cubin's attributes name: EIATTR_KPARAM_INFO, of 12 bytes of value."""
    found = re.finditer(rb"\x04\x17\x0c\x00.{10}(..)", code, re.DOTALL)
    return {hex(int.from_bytes(each[1], "little") >> 2) for each in found}


def test_the_rung_is_the_persistent_one_in_templates() -> None:
    persistent = next(rung for rung in RUNGS if rung.name == "persistent")
    text = SOURCE.read_text()
    rows, columns = persistent.tile
    assert f"Shape<Int<{rows}>, Int<{columns}>, Int<{persistent.depth}>>" in text
    assert f"Cluster = Shape<Int<{persistent.cluster}>, Int<1>, Int<1>>" in text
    assert re.findall(r"^// (Idea|FLOPs|Bytes|Limit|Next) ", text, re.MULTILINE) == [
        "Idea", "FLOPs", "Bytes", "Limit", "Next",
    ]  # fmt: skip


def test_without_the_headers_the_error_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass_rungs, "find_spec", lambda name: None)
    with pytest.raises(NoCudaCompiler, match=r"ridgeline\[cutlass\]"):
        headers()


def test_the_dsls_rung_is_warp_roles() -> None:
    warp_roles = next(rung for rung in RUNGS if rung.name == "warp_roles")
    assert (*warp_roles.tile, warp_roles.depth) == cute_rung.TILE
    assert warp_roles.stages == cute_rung.STAGES
    text = cute_rung.SOURCE.read_text()
    assert f"TILE, STAGES, CONSUMERS = {cute_rung.TILE}, {cute_rung.STAGES}, {cute_rung.THREADS // 128 - 1}\n" in text


def test_a_cubin_names_its_kernel() -> None:
    assert kernel_name(b"\0.text.some_name\0.nv.info.some_name\0.text.some_name\0") == "some_name"
    with pytest.raises(ValueError, match="one kernel is needed, got 2"):
        kernel_name(b"\0.text.one\0.text.two\0")


def test_the_page_compares_all_languages() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kernels" / "templates.md").read_text()
    costs = pytest.importorskip("ridgeline.kernels.gemm.ladder.costs", reason="Triton", exc_type=ImportError)
    for language in costs.languages():
        assert language.file.is_file()
        assert all(file.is_file() for file in language.beneath)
        assert f"| {language.name} | " in page
