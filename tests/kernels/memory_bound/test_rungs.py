"""Every rung of the memory-bound ops beside float64: its file, run by the emulator, in memory that tells of strays."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import Emulated, EmulationError, LaunchShape, SharedCounts, build
from ridgeline.kernels.memory_bound import reference
from ridgeline.kernels.memory_bound.launches import MatrixShape, launches, scratch
from ridgeline.kernels.memory_bound.predict import table, transpose_table, transpose_wavefronts
from ridgeline.kernels.memory_bound.run import takes
from ridgeline.kernels.memory_bound.rungs import FOLDER, RUNGS, MemoryRung, RowCut
from tests.kernels.cuda.memory import Matrix

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")

PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "memory-bound.md"
BY_TITLE = {rung.title: rung for rung in RUNGS}
kernels: dict[tuple[object, ...], Emulated] = {}
BLOCKS = 3  # that run at the same time, so that blocks that stay have several rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rungs")


def emulated(source: Path, rung: MemoryRung, cut: RowCut | None, folder: Path) -> Emulated:
    key = source, *rung.code(cut).defines.items()
    if key not in kernels:
        own = folder / str(len(kernels))  # rungs of several ops have the same file name
        own.mkdir()
        kernels[key] = build(source, rung.kernel, rung.code(cut).defines, own)
    return kernels[key]


def result(
    rung: MemoryRung,
    shape: MatrixShape,
    folder: Path,
    cut: RowCut | None = None,
    order: int = 0,
    source: Path | None = None,
) -> tuple[str, list[SharedCounts]]:
    """Return what is wrong with a rung's result for this shape, and what its launches counted."""
    cut = cut or rung.cut(shape.columns)
    kernel = emulated(source or rung.source, rung, cut, folder)
    given = reference.inputs(rung.op, shape)
    wide = reference.output(rung.op, shape)
    held = {name: Matrix(*each.reshape(-1, each.shape[-1]).shape, each.dtype, each) for name, each in given.items()}
    held["y"] = Matrix(*wide.shape, wide.dtype, torch.zeros(1, 1) if rung.kind == "adds" else None)
    blocks = BLOCKS
    held["scratch"] = Matrix(1, max(1, scratch(rung, shape, blocks)), given["x"].dtype)
    tensors = {name: each.pointer for name, each in held.items()}
    assert tensors["x"].value
    tensors["up"] = ctypes.c_void_p(tensors["x"].value + shape.columns * given["x"].element_size())
    counted = []
    for each in launches(rung, shape, cut, blocks):
        cluster = each.grid[0] if each.together else each.cluster
        kernel.launch(LaunchShape(each.grid, each.block, cluster, each.shared, order), each.bound(tensors))
        counted.append(kernel.counted())
    assert all(each.guarded() for each in held.values()), "it wrote outside its output"
    return reference.fault(rung, rung.op, held["y"].values(), given), counted


def shapes(rung: MemoryRung) -> list[MatrixShape]:
    """Shapes that end where a block's piece does, that do not, and the smallest."""
    step = rung.multiple
    if rung.kernel == "transpose":
        return [
            MatrixShape(2 * rung.tile, rung.tile),
            MatrixShape(rung.tile + 3 * step, 2 * rung.tile + 5 * step),
            MatrixShape(step, step),
        ]
    if rung.clustered:
        return [MatrixShape(1, 16384), MatrixShape(2, 9000 + 16 * step), MatrixShape(1, 8192 + step)]
    if rung.kind in ("block", "registers", "stays"):
        return [MatrixShape(7, 1024), MatrixShape(9, 1000 + 16 * step), MatrixShape(2, step)]
    return [MatrixShape(2, 4096), MatrixShape(3, 1000 + 7 * step), MatrixShape(1, step)]


@pytest.mark.few(3)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.title)
def test_whole_pieces_parts_of_them_and_the_smallest(rung: MemoryRung, folder: Path) -> None:
    """Those of parts with threads in shuffled order."""
    for shape, order in zip(shapes(rung), (0, 2, 1), strict=True):
        assert takes(rung, shape)
        assert result(rung, shape, folder, order=order)[0] == "", shape


CLUSTERS = [rung for rung in RUNGS if rung.clustered]


@pytest.mark.few(1)
@pytest.mark.parametrize("rung", CLUSTERS, ids=lambda rung: rung.title)
@pytest.mark.parametrize("cut", [RowCut(64, 1, 4, 4), RowCut(32, 3, 1, 8), RowCut(96, 2, 4, 2)], ids=str)
def test_the_blocks_of_a_cluster_divide_rows(rung: MemoryRung, cut: RowCut, folder: Path) -> None:
    """The last block has fewer columns than the others, or none, and the last cluster fewer rows."""
    cut = replace(cut, rows=1, ahead=cut.rows) if rung.clusters else cut
    for columns, order in ((cut.columns - 8, 2), (cut.columns, 1), (cut.columns * (cut.cluster - 1) // cut.cluster, 3)):
        assert result(rung, MatrixShape(3 * BLOCKS - 1, columns), folder, cut, order)[0] == "", columns


def test_rungs_are_in_order_and_each_says_what_it_is() -> None:
    assert sorted({rung.source for rung in RUNGS}) == sorted(FOLDER.glob("*/*.cu"))
    for rung in RUNGS:
        told = re.findall(r"^// (Idea|Bytes|Limit|Next) ", rung.source.read_text(), re.MULTILINE)
        assert told[:3] == ["Idea", "Bytes", "Limit"], rung.title


def test_the_page_has_the_predictions() -> None:
    text = PAGE.read_text()
    assert "\n".join(table(MatrixShape(32768, 4096))) in text
    assert "\n".join(transpose_table(MatrixShape(8192, 8192))) in text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["shared_tile", "padded", "swizzled", "vectors"])
def test_banks_of_a_transpose_are_as_predicted(name: str, folder: Path) -> None:
    rung = BY_TITLE[f"transpose-{name}"]
    [counted] = result(rung, MatrixShape(rung.tile, rung.tile), folder)[1]
    assert counted.wavefronts == transpose_wavefronts(rung) * rung.tile**2 / 32
    assert (counted.wavefronts == counted.accesses) == (name != "shared_tile")


@pytest.mark.few(1)
@pytest.mark.parametrize(("title", "old", "new", "told"), [
    ("transpose-padded", "  __syncthreads();\n", "", "wrong"),
    ("transpose-swizzled", "j ^ threadIdx.x", "j", "wrong"),
    ("reduction-grid", "  grid.sync();\n", "", "wrong"),
    ("silu-vectors", "if (at >= count) continue;\n    reinterpret", "reinterpret", "not its own"),
])  # fmt: skip
def test_a_rung_with_a_fault_is_found_wrong(title: str, old: str, new: str, told: str, folder: Path) -> None:
    rung = BY_TITLE[title]
    assert old in rung.source.read_text()
    broken = folder / f"broken-{title}.cu"
    broken.write_text(rung.source.read_text().replace(old, new))
    found, at = [], 0 if rung.kind == "grid" else 1  # a grid of one block has nobody to wait for
    for order in range(3):
        try:
            found.append(result(rung, shapes(rung)[at], folder, order=order, source=broken)[0])
        except (EmulationError, AssertionError) as error:
            found.append(str(error))
    assert told in "; ".join(found)
