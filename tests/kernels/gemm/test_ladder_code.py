"""The machine code of the rungs, compiled without a GPU: the instructions that each is about, and no spills."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ridgeline.kernels.cuda.compile import CudaError, NoCudaCompiler, compilers, cubin, machine_code
from ridgeline.kernels.gemm.ladder import run
from ridgeline.kernels.gemm.ladder.other_gpus import PAIRS
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS, Rung, Variant
from tests.kernels import compiled as kept
from tests.kernels.compiled import compiled, compiler_here, costly, cuda_kernels, facts, known, source_of, stored

pytest.importorskip("triton", reason="its package has the disassembler")
HERE = compilers()
needs_compiler = pytest.mark.skipif(not HERE, reason='no NVRTC and no nvcc; pip install "ridgeline[ladders]" has NVRTC')


def unchanged(rung: Rung, few: tuple[str, ...]) -> Any:
    """The rung as a parameter: compiled in each run if it changed, and if it is one of a few with another compiler."""
    late = rung.name not in few and costly(rung.source, rung.arch, rung.defines)
    return pytest.param(rung, id=rung.name, marks=[pytest.mark.thorough] if late else [])


@needs_compiler
@pytest.mark.parametrize("rung", [unchanged(each, ("vector_loads", "async_stores")) for each in RUNGS])
def test_a_rung_uses_the_machine_as_it_says(rung: Rung) -> None:
    code = facts(rung.source, rung.arch, rung.defines)
    assert [needed for needed in rung.needs if not code.has(needed)] == []
    assert code.stack == 0, "registers are spilled"
    assert code.registers <= rung.registers
    assert code.number("MEMBAR.ALL.GPU") <= 2, "a cluster meets twice; a wait for memory in each step is slow"
    products = {name: count for name, count in code.counts.items() if name.startswith("HGMMA.")}
    if products:  # one of four ends a group; where ptxas fears for the sums, it waits behind each of them
        assert sum(count for name, count in products.items() if "gsb0" in name) == sum(products.values()) / 4


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "source", "arch", "defines"), list(cuda_kernels()), ids=[name for name, *_ in cuda_kernels()]
)
def test_what_is_kept_of_a_rung_is_what_it_compiles_to(
    name: str, source: Path, arch: str, defines: Mapping[str, str]
) -> None:
    line = stored().get(source_of(source.read_text(), arch, defines))
    if line is None or line["compiler"] != compiler_here():
        pytest.skip(f"nothing is kept of {name} and this compiler; python -m tests.kernels.compiled keeps it")
    assert compiled(source, arch, defines) == facts(source, arch, defines)


def test_a_changed_header_definition_or_file_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = '#include "own.cuh"\n'
    (tmp_path / "own.cuh").write_text('#include "deep.cuh"\n')
    (tmp_path / "deep.cuh").write_text("// one\n")
    monkeypatch.setattr(kept, "HEADERS", tmp_path)
    before = source_of(first, "sm_90", {"A": "1"})
    assert before == source_of(first, "sm_90", {"A": "1"})
    assert before != source_of(first, "sm_80", {"A": "1"})
    assert before != source_of(first, "sm_90", {"A": "2"})
    (tmp_path / "deep.cuh").write_text("// two\n")
    assert before != source_of(first, "sm_90", {"A": "1"})
    (tmp_path / "deep.cuh").write_text("// one\n")
    assert before != source_of(f"{first}// more\n", "sm_90", {"A": "1"})
    assert before != source_of(first, "gfx942", {"A": "1"})


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_rungs_compile_by_each_compiler_and_for_later_architectures(compiler: str) -> None:
    if compiler not in HERE:
        pytest.skip(f"{compiler} is not installed")
    for rung in RUNGS:
        for arch in ("sm_80", "sm_90a", "sm_120") if rung.arch == "sm_80" else (rung.arch,):
            assert machine_code(cubin(rung.source, arch, rung.defines, compiler)).stack == 0


@needs_compiler
@pytest.mark.parametrize("rung", [unchanged(each.product, ("wmma-16x16x16-int8",)) for each in VARIANTS])
def test_wmma_in_other_shapes_and_formats(rung: Rung) -> None:
    code = facts(rung.source, rung.arch, rung.defines)
    assert code.has(next(each.needs for each in VARIANTS if each.product == rung))
    assert code.stack == 0


@needs_compiler
@pytest.mark.parametrize("variant", [
    pytest.param(each, id=each.name, marks=[pytest.mark.thorough] if known(
        each.ceiling.source.read_text(), "sm_90", each.defines
    ) else []) for each in VARIANTS
])  # fmt: skip
def test_a_ceiling_multiplies_in_registers_alone(variant: Variant) -> None:
    rung = variant.ceiling
    code = machine_code(cubin(rung.source, "sm_90", rung.defines))
    assert code.stack == 0
    lines = [line.split("*/")[1].split() for line in code.listing.splitlines() if line.count("*/") and ";" in line]
    operations = [next(word for word in line if not word.startswith("@")) for line in lines if line]
    products = [at for at, name in enumerate(operations) if name.startswith(variant.needs)]
    assert len(products) >= 32
    assert products[-1] - products[0] <= 1.2 * len(products) + 8, "something else stands between the products"
    assert not any(name.startswith(("LD", "ST")) for name in operations[products[0] : products[-1]])


@needs_compiler
@pytest.mark.parametrize(
    "compiler", [HERE[0] if HERE else "", *(pytest.param(each, marks=pytest.mark.thorough) for each in HERE[1:])]
)
def test_a_branch_around_a_store_of_sums_is_refused(compiler: str, tmp_path: Path) -> None:
    rung = next(rung for rung in RUNGS if rung.name == "warp_roles")
    store = "store_if(row < m && column < n, c + (size_t)row * n + column, pair);"
    assert store in rung.source.read_text()
    branch = "if (row < m && column < n) *reinterpret_cast<Pair *>(c + (size_t)row * n + column) = pair;"
    broken = tmp_path / "branch.cu"
    broken.write_text(rung.source.read_text().replace(store, branch))
    with pytest.raises(CudaError, match=r"C751.*serialized"):
        cubin(broken, rung.arch, {}, compiler)


def test_without_a_compiler_the_error_says_how_to_get_one() -> None:
    with pytest.raises(NoCudaCompiler, match=r"ridgeline\[ladders\]"):
        cubin(RUNGS[0].source, "sm_80", {}, "none")


@needs_compiler
def test_rungs_are_carried_as_files_for_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [rung for rung in RUNGS if rung.name in ("naive", "multicast")]
    monkeypatch.setattr(run, "RUNGS", few)
    monkeypatch.setattr(run, "ENDINGS", ())
    monkeypatch.setattr(run, "VARIANTS", ())
    monkeypatch.setattr(run, "_of_extras", lambda folder: ())
    run.main(tmp_path, ("sm_90", "sm_120"))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "multicast.sm_90a.cubin", "naive.sm_120.cubin", "naive.sm_90.cubin",
    ]  # fmt: skip
    assert run.code_of(few[0], "sm_90", tmp_path) == (tmp_path / "naive.sm_90.cubin").read_bytes()
    with pytest.raises(NoCudaCompiler, match=r"naive\.sm_100\.cubin is not there; .* sm_100\.$"):
        run.code_of(few[0], "sm_100", tmp_path)


def test_a_device_runs_rungs_of_its_own_generation() -> None:
    naive, multicast = RUNGS[0], next(rung for rung in RUNGS if rung.name == "multicast")
    assert [run.arch_on(naive, (major, 0)) for major in (7, 8, 9, 12)] == ["", "sm_80", "sm_90", "sm_120"]
    assert [run.arch_on(multicast, (major, 0)) for major in (8, 9, 10)] == ["", "sm_90a", ""]
    assert [run.arch_on(PAIRS, (10, minor)) for minor in (0, 3)] == ["sm_100a", ""]
