"""Rungs for Blackwell: each file run by the emulator beside float64, NVFP4 beside its definition, and machine code."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.compile import compilers
from ridgeline.kernels.cuda.emulate import Emulated, EmulationError, LaunchShape, SharedCounts, build
from ridgeline.kernels.gemm.ladder.fp4 import Fp4Matrix, quantize
from ridgeline.kernels.gemm.ladder.other_gpus import FP4, PAIRS
from ridgeline.kernels.gemm.ladder.rungs import Rung
from tests.kernels.compiled import facts
from tests.kernels.cuda.memory import Matrix, difference
from tests.kernels.gemm.test_ladder import emulated, found_wrong, product

needs_emulator = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rungs")


@needs_emulator
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((600, 264, 456), 2),  # four clusters, of which the first takes two others' tiles; stages come again
        pytest.param((600, 264, 456), 0, marks=pytest.mark.thorough),
        pytest.param((1030, 776, 136), 1, marks=pytest.mark.thorough),
        pytest.param((512, 1280, 64), 3, marks=pytest.mark.thorough),
        ((1, 8, 8), 0),
    ],
)
def test_pairs_of_blocks_are_right(shape: tuple[int, int, int], order: int, folder: Path) -> None:
    assert product(emulated(PAIRS, folder), PAIRS, *shape, order)[0] == ""


BROKEN_PAIRS = {
    "a stage that only its own pair has left": ("[at], ALL);", "[at], 0b11 << leader_rank());", "mbarrier"),
    "bytes of one block alone": ("2 * sizeof(Stage)", "sizeof(Stage)", "waits for ever"),
    "sums that are stored before they are there": (
        "    mbarrier_wait(&shared.made[sums], walk.count / 2 % 2);\n", "", "wrong",
    ),
    "sums that are read without a wait": ("      tensor_wait();\n", "", "nan"),
    "sums that are overwritten before they are stored": (
        "    mbarrier_wait(&shared.stored[sums], walk.count / 2 % 2 ^ 1);\n", "", "",
    ),
    "lanes of another warp": ("(warp * 32 << 16)", "(0 << 16)", "does not reach"),
    "tensor memory that is kept": ("  if (warp == 3) tensor_free", "  if (warp == 9) tensor_free", "not freed"),
    "an answer that some have not read": ("READERS = CLUSTER * 6 +", "READERS = CLUSTER * 3 +", ""),
    "one tile more than there are": ("    return found;", "    return found || count < 3;", ""),
}  # fmt: skip


@needs_emulator
@pytest.mark.thorough
@pytest.mark.parametrize("fault", BROKEN_PAIRS)
def test_pairs_with_a_fault_are_found_wrong(fault: str, tmp_path: Path) -> None:
    *change, told = BROKEN_PAIRS[fault]
    found = [found_wrong(PAIRS, *change, tmp_path, (600, 776, k), range(4)) for k in (72, 456)]
    assert any(found)
    assert told in "; ".join(found)


class Operand(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), ("scales", ctypes.c_void_p))


def fp4_product(kernel: Emulated, a: Fp4Matrix, b: Fp4Matrix, order: int) -> tuple[str, SharedCounts]:
    (m, k), n = a.codes.shape, len(b.codes)
    held = []
    for each in (a, b):
        packed, scales = each.packed().view(torch.int8), each.tiled_scales().flatten(1).view(torch.int8)
        held += [Matrix(*packed.shape, torch.int8, packed), Matrix(*scales.shape, torch.int8, scales)]
    c = Matrix(m, n, torch.bfloat16)
    operands = [Operand(numbers.pointer, scales.pointer) for numbers, scales in (held[:2], held[2:])]
    sizes = map(ctypes.c_int, (m, n, k))
    shape = LaunchShape(FP4.grid(m, n, 2), (*FP4.block, 1), shared=FP4.shared, order=order)
    kernel.launch(shape, [*operands, ctypes.c_float(a.scale * b.scale), c.pointer, *sizes])
    assert all(each.guarded() for each in (*held, c))
    return difference(c.values(), a.values(), b.values()), kernel.counted()


def random_fp4(rows: int, k: int) -> Fp4Matrix:
    """All codes, and scales from 1/8 to 32."""
    scales = torch.randint(0x20, 0x60, (rows, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Fp4Matrix(torch.randint(0, 16, (rows, k), dtype=torch.uint8), scales, 1.0)


@pytest.mark.dealt
@needs_emulator
def test_fp4_is_right_beside_float64(folder: Path) -> None:
    kernel = emulated(FP4, folder)
    whole, counted = fp4_product(kernel, random_fp4(128, 256), random_fp4(128, 256), 0)
    assert whole == ""
    assert counted.accesses == counted.wavefronts == 8 * 4 * 6 * 4, "warps, blocks of K, ldmatrix of 4 matrices"
    assert fp4_product(kernel, random_fp4(170, 608), random_fp4(136, 608), 2)[0] == ""
    assert fp4_product(kernel, random_fp4(1, 32), random_fp4(8, 32), 1)[0] == ""
    drawn = [torch.randn(rows, 320) for rows in (130, 144)]
    assert fp4_product(kernel, quantize(drawn[0]), quantize(drawn[1]), 2)[0] == ""


@needs_emulator
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lane % 2 * 8 + lane / 4", "lane / 4"),
        ("x + j * 8 + lane / 4);", "x + lane / 4);"),
        ("row % 32 * 16 + row / 32 * 4", "row * 4"),
        ("2 * d + lane / 8 % 2", "2 * d"),
        ("pair.at[1], scale *", "pair.at[1],"),
    ],
)
def test_fp4_with_a_fault_is_found_wrong(old: str, new: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    assert old in FP4.source.read_text()
    broken.write_text(FP4.source.read_text().replace(old, new))
    kernel = build(broken, "gemm", {}, tmp_path)
    a, b = quantize(torch.randn(170, 608)), quantize(torch.randn(136, 608))
    try:
        told = fp4_product(kernel, a, b, 2)[0]
    except EmulationError as error:
        told = str(error)
    assert told != ""


def test_quantized_numbers_are_the_nearest_that_the_format_has() -> None:
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    x[3] = 0
    made = quantize(x)
    signs, sizes = torch.tensor([1.0, -1.0]).double(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    every = (signs[:, None] * sizes).flatten() * made.scale * made.scales.double()[..., None]  # [40, 4, 16]
    errors = (x.double().unflatten(1, (4, 16))[..., None] - every[:, :, None]).abs().amin(-1)
    assert torch.equal((x.double() - made.values()).abs(), errors.flatten(1))
    assert float((quantize(x[:1]).values() - x[:1].double()).norm() / x[0].double().norm()) < 0.15
    assert quantize(torch.tensor([[6.0, 2.5, 1.75, 0.25, 5, -0.75, *([0.0] * 10)]])).codes[0, :6].tolist() == [
        7, 4, 4, 0, 6, 10,
    ]  # fmt: skip


def test_scales_lie_as_cublas_wants_them() -> None:
    scales = torch.arange(300 * 6).remainder(0x7F).view(300, 6).to(torch.uint8)
    matrix = Fp4Matrix(torch.zeros(300, 96, dtype=torch.uint8), scales.view(torch.float8_e4m3fn), 1.0)
    flat = matrix.tiled_scales().flatten()
    for row, block in itertools.product(range(300), range(6)):  # the formula of cuBLAS' documentation
        tile = (row // 128 * 2 + block // 4) * 512
        assert flat[tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] == scales[row, block]


@pytest.mark.skipif(not compilers(), reason='no NVRTC and no nvcc; pip install "ridgeline[ladders]" has NVRTC')
@pytest.mark.parametrize("rung", [PAIRS, FP4], ids=lambda rung: rung.name)
def test_blackwell_machine_code_has_the_instructions_and_spills_nothing(rung: Rung) -> None:
    pytest.importorskip("triton", reason="its package has the disassembler")
    code = facts(rung.source, rung.arch, rung.defines)
    assert [needed for needed in rung.needs if not code.has(needed)] == []
    assert code.stack == 0, "registers are spilled"
    assert code.registers <= rung.registers
    counted = {"fp4": ("OMMA.SF", 4 * 4 * 4), "pairs": ("UTCHMMA.2CTA", 3 * 4)}[rung.name]
    assert code.number(counted[0]) == counted[1]
