"""Every rung of the GEMM ladder beside float64: its own file, run by the emulator, in memory that tells of strays."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import Emulated, EmulationError, LaunchShape, SharedCounts, build
from ridgeline.kernels.cuda.predict import WARP
from ridgeline.kernels.gemm.ladder.predict import WORK, table
from ridgeline.kernels.gemm.ladder.rungs import FOLDER, RUNGS, VARIANTS, Extras, Rung, Variant
from tests.kernels.cuda.memory import Matrix, difference

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")

every_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "gemm-ladder.md"
kernels: dict[Path, Emulated] = {}
FEW = 2  # multiprocessors, so that persistent blocks make several tiles each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rungs")


def emulated(rung: Rung, folder: Path) -> Emulated:
    if rung.source not in kernels:
        kernels[rung.source] = build(rung.source, "gemm", rung.defines, folder)
    return kernels[rung.source]


def product(kernel: Emulated, rung: Rung, m: int, n: int, k: int, order: int = 0) -> tuple[str, SharedCounts]:
    """Return what is wrong with a product of this shape, and what the launch counted."""
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    a_, b_, c_ = Matrix(m, k, a.dtype, a), Matrix(n, k, b.dtype, b), Matrix(m, n, a.dtype)
    shape = LaunchShape(rung.grid(m, n, FEW), (*rung.block, 1), cluster=rung.cluster, shared=rung.shared, order=order)
    boxes = (*rung.boxes, 0, 0, 0)
    operands = [x.map(rows) if rows else x.pointer for x, rows in zip((a_, b_, c_), boxes, strict=False)]
    extras = [Extras()] if rung.extras else []
    kernel.launch(shape, [*operands, *map(ctypes.c_int, (m, n, k)), *extras])
    assert a_.guarded()
    assert b_.guarded()
    assert c_.guarded(), "it wrote outside its output"
    return difference(c_.values(), a, b), kernel.counted()


def ragged(rung: Rung) -> tuple[int, int, int]:
    """A shape of more than one tile each way, none of which ends where a tile does, and in which stages come again."""
    rows, columns = rung.tile
    step = rung.multiple
    return (
        rows + max(1, rows // 3),
        columns + max(step, columns // 3 // step * step),
        (rung.stages + 1) * (rung.depth or 32) + step,
    )


def aligned(rung: Rung) -> tuple[int, int, int]:
    """A shape of whole tiles, of which each consumer of a persistent block makes some."""
    rows, columns = rung.tile
    return rows, (3 if rung.persistent else 2) * columns, (2 * rung.stages + 1) * (rung.depth or 32)


@every_rung
def test_shapes_of_whole_tiles_of_parts_and_smaller_than_a_tile(rung: Rung, folder: Path) -> None:
    """Those of parts with threads in shuffled order."""
    smallest = (1, rung.multiple, rung.multiple)
    for shape, order in ((aligned(rung), 0), (ragged(rung), 2), (smallest, 0)):
        assert product(emulated(rung, folder), rung, *shape, order)[0] == "", shape


@pytest.mark.thorough
@every_rung
@pytest.mark.parametrize("order", [0, 1])
def test_ragged_shapes_in_other_orders_of_threads(rung: Rung, order: int, folder: Path) -> None:
    assert product(emulated(rung, folder), rung, *ragged(rung), order)[0] == ""


@pytest.mark.dealt
def test_more_rows_of_tiles_than_a_group(folder: Path) -> None:
    rung = BY_NAME["wmma"]
    assert product(emulated(rung, folder), rung, 9 * rung.tile[0] + 5, rung.tile[1] + 8, 8)[0] == ""


FULL = "    mbarrier_wait(&shared.full[step % STAGES], step / STAGES % 2);\n"
EMPTY = "    mbarrier_wait(&shared.empty[at], step / STAGES % 2 ^ 1);"
LEAVE = " && step > 0) mbarrier_arrive(&shared.empty[(step + STAGES - 1) % STAGES]"
BROKEN = {
    "tiles are read before they are written": ("shared_tiles", "    __syncthreads();\n    for", "    for", "wrong"),
    "tiles are written before all have read": ("shared_tiles", "[j][x];\n    __syncthreads();", "[j][x];", "wrong"),
    "a wait that waits for nothing": ("cp_async", "cp_async_wait<1>", "cp_async_wait<2>", "nan"),
    "no barrier behind the wait": ("cp_async", "<1>();\n    __syncthreads();", "<1>();", "nan"),
    "a buffer that is filled while it is read": ("cp_async", "    }\n    __syncthreads();\n  }", "    }\n  }", "nan"),
    "rows behind the last one are read": ("cp_async", "first + row < rows && ", "", "not its own"),
    "a swizzle of the reader alone": (
        "mma_sync", "tile.piece(row + i * THREADS / 8, threadIdx.x % 8)",
        "&tile.at[row + i * THREADS / 8][threadIdx.x % 8 * 8]", "wrong",
    ),
    "a stage that is filled while it is read": (
        "mma_sync", "STAGES - 2>();\n        __syncthreads();", "STAGES - 2>();", "nan",
    ),
    "fragments that are loaded before their stage came": (
        "wmma", "STAGES - 2>();\n        __syncthreads();", "STAGES - 1>();\n        __syncthreads();", "nan",
    ),
    "a stage that is read before it came": ("wgmma_tma", FULL, "", "mbarrier"),
    "sums that are read before they are there": ("wgmma_tma", "    wgmma_wait<0>();\n", "", "wgmma on its way"),
    "wgmma without its fence": ("wgmma_tma", "    wgmma_fence();\n", "", "before wgmma.fence"),
    "a stage that is filled before all have left it": ("warp_roles", EMPTY, "", "mbarrier"),
    "a stage that is left before it was read": (
        "warp_roles", LEAVE, ") mbarrier_arrive(&shared.empty[step % STAGES]", "nan",
    ),
    "sums that are read while the last products run": (
        "warp_roles", "  wgmma_wait<0>();\n", "", "wgmma on its way",
    ),
    "only the own block is told that a stage is empty": ("multicast", "STAGES], lane);", "STAGES]);", "nan"),
    "stages that are counted anew for each tile": ("persistent", "count += steps", "count = 0", "waits for ever"),
    "a consumer that counts its own steps alone": (
        "ping_pong", "tile * steps, steps", "tile / 2 * steps, steps", "waits for ever",
    ),
    "a turn that does not end": (
        "ping_pong", "  if (lane == 0) mbarrier_arrive(&shared.turn[group ^ 1]);\n", "", "waits for ever",
    ),
    "a strip that is written again before it was read": (
        "async_stores", "tma_wait_read<BUFFERS - 1>", "tma_wait_read<BUFFERS>", "wrong",
    ),
    "a strip that TMA may not read yet": ("async_stores", "    fence_for_tma();\n", "", "fence.proxy.async"),
    "sums that are sent while the other block multiplies": (
        "shared_sums", "  mbarrier_wait(&shared.ready, 0); ", "", "nan",
    ),
    "sums that are read before they came": (
        "shared_sums", "  mbarrier_wait_cluster(&shared.sums, 0);\n", "", "on their way",
    ),
    "columns behind the last one are written": ("naive", "|| column >= n", "", "not its own"),
    "threads that leave before a barrier": (
        "shared_tiles", "  float sum = 0;", "  if (row >= m) return;\n  float sum = 0;",
        "waits for ever: __syncthreads",
    ),
}  # fmt: skip
FEW_FAULTS = (
    "a wait that waits for nothing",
    "a stage that is left before it was read",
)
BY_NAME = {rung.name: rung for rung in RUNGS}


def found_wrong(
    rung: Rung, old: str, new: str, folder: Path, shape: tuple[int, int, int] | None = None, orders: range = range(3)
) -> str:
    """Return what the emulator says of a rung in whose file `old` is replaced by `new`, or "".

    The product has a ragged shape unless one is given, and runs in each order of threads.
    """
    text = rung.source.read_text()
    assert old in text
    broken = folder / f"broken-{abs(hash((old, new)))}.cu"
    broken.write_text(text.replace(old, new))
    kernel = build(broken, "gemm", rung.defines, folder)
    told = []
    for order in orders:
        try:
            told.append(product(kernel, rung, *(shape or ragged(rung)), order)[0])
        except (EmulationError, AssertionError) as error:
            told.append(str(error))
    return "; ".join(filter(None, told))


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [
    fault if fault in FEW_FAULTS else pytest.param(fault, marks=pytest.mark.thorough) for fault in BROKEN
])  # fmt: skip
def test_a_rung_with_a_fault_is_found_wrong(fault: str, folder: Path) -> None:
    name, *change, told = BROKEN[fault]
    assert told in found_wrong(BY_NAME[name], *change, folder)


@pytest.mark.dealt
def test_the_conflict_free_layout_has_no_conflicts(folder: Path) -> None:
    cycles = {}
    for name in ("vector_loads", "conflict_free"):
        rung = BY_NAME[name]
        counted = product(emulated(rung, folder), rung, *rung.tile, rung.depth)[1]
        cycles[name] = counted.wavefronts / (rung.tile[0] * rung.tile[1] * rung.depth / WARP)
        assert cycles[name] == WORK[name].shared, "what the prediction takes for granted"
        assert (counted.wavefronts == counted.accesses) == (name == "conflict_free")


def test_rungs_are_in_order_and_each_says_what_it_is() -> None:
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert sorted({rung.source for rung in RUNGS}) == sorted(FOLDER.glob("*.cu"))
    for rung in RUNGS:
        told = re.findall(r"^// (Idea|FLOPs|Bytes|Limit|Next) ", rung.source.read_text(), re.MULTILINE)
        assert told == ["Idea", "FLOPs", "Bytes", "Limit", "Next"][: 5 if rung is not RUNGS[-1] else len(told)]
        assert rung.source.read_text().startswith(f"// {rung.number}. ")


def test_the_page_has_the_predictions() -> None:
    assert "\n".join(table()) in PAGE.read_text()


def variant_is_right(variant: Variant, folder: Path, m: int, n: int, k: int) -> None:
    rung = BY_NAME["wmma"]
    kernel = build(rung.source, "gemm", variant.defines, folder)
    dtype, result = getattr(torch, variant.dtype), getattr(torch, variant.result)
    made = [torch.randn(rows, k) * (30 if dtype == torch.int8 else 1) for rows in (m, n)]
    a, b = (x.to(dtype) for x in made)
    a_, b_, c_ = Matrix(m, k, dtype, a), Matrix(n, k, dtype, b), Matrix(m, n, result)
    sizes = map(ctypes.c_int, (m, n, k))
    shape = LaunchShape(rung.grid(m, n, FEW), (*rung.block, 1), shared=rung.shared)
    kernel.launch(shape, [a_.pointer, b_.pointer, c_.pointer, *sizes])
    assert c_.guarded()
    found = c_.values()
    if variant.dtype != "float32":
        assert difference(found, a, b) == ""
        return
    exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    assert ((found - exact).abs() <= 2**-10 * size).all()  # both operands are rounded to 11 bits
    kept = [(x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for x in (a, b)]
    assert difference(found, *kept) == ""


@pytest.mark.dealt
@pytest.mark.parametrize("variant", [
    each if each.name == "16x16x16-int8" else
    pytest.param(each, marks=pytest.mark.thorough) for each in VARIANTS
], ids=lambda variant: variant.name)  # fmt: skip
def test_wmma_in_other_shapes_and_formats(variant: Variant, folder: Path) -> None:
    step = variant.multiple
    variant_is_right(variant, folder, 101, 72, 64 + step)


@pytest.mark.dealt
@pytest.mark.parametrize("variant", [
    each if each.name == "32x8x16-float16" else
    pytest.param(each, marks=pytest.mark.thorough) for each in VARIANTS
], ids=lambda variant: variant.name)  # fmt: skip
def test_a_ceiling_does_all_its_products(variant: Variant, folder: Path) -> None:
    k, rounds = variant.shape[2], 5
    kernel = build(variant.ceiling.source, "ceiling", variant.defines, folder)
    out = Matrix(2, 256, torch.int32 if variant.result == "int32" else torch.float32)
    dtype = getattr(torch, variant.dtype)
    a, b = (torch.randint(-9, 10, (64, k)).to(dtype) for _ in range(2))  # float32 holds the sums of such numbers
    a_, b_ = Matrix(64, k, dtype, a), Matrix(64, k, dtype, b)
    arguments = [out.pointer, a_.pointer, b_.pointer, ctypes.c_int(rounds)]
    kernel.launch(LaunchShape((2, 1, 1), (256, 1, 1)), arguments)
    assert out.guarded()
    assert (out.values().view(-1, 32).double().sum(1) == rounds * (a.double() @ b.double().T).sum()).all()
    assert variant.rounds(2.0 * 64 * 64 * k * 16 * rounds, 2) == rounds, "16 warps"


def test_ldmatrix_has_no_bank_conflicts(folder: Path) -> None:
    rung = BY_NAME["mma_sync"]
    counted = product(emulated(rung, folder), rung, *rung.tile, rung.depth)[1]
    assert counted.accesses == 8 * (4 + 1) * (4 + 4) * 4, "8 warps, 4 steps of K and one more, 8 times 4 matrices"
    assert counted.wavefronts == counted.accesses
