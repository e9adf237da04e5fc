"""Fragments of matrix instructions beside Triton's layouts, AMD's documents, and on a GPU beside the instructions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import reduce
from importlib.util import find_spec

import pytest

from ridgeline.kernels.micro.mma_mfma.layouts import INSTRUCTIONS, MatrixFragment, MatrixInstruction, described, find

FRAGMENTS = [(each, fragment) for each in INSTRUCTIONS for fragment in each.fragments]
NAMES = [f"{each.name}-{fragment.operand}" for each, fragment in FRAGMENTS]


def fragment(name: str, operand: str) -> MatrixFragment:
    return next(each for each in INSTRUCTIONS if each.name == name)[operand]


@pytest.mark.parametrize(("instruction", "part"), FRAGMENTS, ids=NAMES)
def test_lanes_have_every_number_of_a_matrix_and_nothing_else(
    instruction: MatrixInstruction, part: MatrixFragment
) -> None:
    found = Counter(part.at(lane, place) for lane in range(part.lanes) for place in range(part.places))
    assert found == {(row, column): part.copies for row in range(part.rows) for column in range(part.columns)}


SCRIPT = """
import json, sys
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import amd
context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
if not hasattr(builder, "to_linear_layout"):
    sys.exit(3)

def bases(layout, shape):
    found = builder.to_linear_layout(layout._to_ir(builder), shape)
    return [[*found.lane_bases, *found.warp_bases], found.reg_bases]

sums = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
group = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
wide, square = (
    amd.AMDMFMALayout(version=3, instr_shape=shape, transposed=False, warps_per_cta=[1, 1])
    for shape in ([32, 32, 8], [16, 16, 16])
)
part = gl.DotOperandLayout
print(json.dumps({
    "mma.m16n8k16 A": bases(part(0, sums, 2), [16, 16]),
    "mma.m16n8k16 B": bases(part(1, sums, 2), [16, 8]),
    "mma.m16n8k16 D": bases(sums, [16, 8]),
    "mma.m16n8k8 A": bases(part(0, sums, 1), [16, 8]),
    "mma.m16n8k32 A": bases(part(0, sums, 4), [16, 32]),
    "wgmma.m64n64k16 D": bases(group, [64, 64]),
    "v_mfma_f32_32x32x8_bf16 A": bases(part(0, wide, 4), [32, 8]),
    "v_mfma_f32_32x32x8_bf16 B": bases(part(1, wide, 4), [8, 32]),
    "v_mfma_f32_32x32x8_bf16 D": bases(wide, [32, 32]),
    "v_mfma_f32_16x16x16_bf16 A": bases(part(0, square, 4), [16, 16]),
    "v_mfma_f32_16x16x16_bf16 D": bases(square, [16, 16]),
    "v_wmma_f32_16x16x16_bf16 (wave32) D":
        bases(amd.AMDWMMALayout(version=1, transposed=False, warp_bases=[]), [16, 16]),
}))
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[list[list[int]]]]:
    """Triton's layouts as bases: which bit of a lane, or of a register, moves a number by how much.

    They come from a process of their own, since Triton complains at the end about objects that live on.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"this Triton shows no such layouts: {done.stderr[-200:]}")
    found: dict[str, list[list[list[int]]]] = json.loads(done.stdout)
    return found


def place_of(bases: list[list[int]], number: int) -> tuple[int, int]:
    chosen = (base for bit, base in enumerate(bases) if number >> bit & 1)
    row, column = reduce(lambda at, base: (at[0] ^ base[0], at[1] ^ base[1]), chosen, (0, 0))
    return row, column


def test_fragments_are_those_that_triton_compiles_with(theirs: dict[str, list[list[list[int]]]]) -> None:
    assert len(theirs) == 12
    for name, (lanes, registers) in theirs.items():
        ours = fragment(*name.rsplit(" ", 1))
        for lane in range(ours.lanes):
            for place in range(ours.places):
                (row, column), (down, right) = place_of(lanes, lane), place_of(registers, place)
                assert ours.at(lane, place) == (row ^ down, column ^ right), name


# As AMD's matrix instruction calculator prints them: row, column, and the lanes with their numbers. It was asked for
# all 3,840 numbers of these fragments once, and agreed.
DOCUMENTED = (
    ("v_mfma_f32_32x32x8_bf16", "D", 9, 3, [(3, 5)]),
    ("v_mfma_f32_32x32x8_bf16", "D", 12, 31, [(63, 4)]),
    ("v_mfma_f32_16x16x16_bf16", "B", 14, 2, [(50, 2)]),
    ("v_wmma_f32_16x16x16_bf16 (wave32)", "A", 3, 5, [(3, 5), (19, 5)]),
    ("v_wmma_f32_16x16x16_bf16 (wave32)", "D", 5, 7, [(23, 2)]),
    ("v_wmma_f32_16x16x16_bf16 (wave64)", "A", 1, 0, [(1, 0), (17, 0), (33, 0), (49, 0)]),
    ("v_wmma_f32_16x16x16_bf16 (wave64)", "D", 6, 9, [(41, 1)]),
)


@pytest.mark.parametrize(("name", "operand", "row", "column", "owners"), DOCUMENTED)
def test_fragments_of_amd_are_those_of_its_documents(
    name: str, operand: str, row: int, column: int, owners: list[tuple[int, int]]
) -> None:
    assert fragment(name, operand).owners(row, column) == owners


def test_an_instruction_is_printed_with_the_lanes_of_each_number() -> None:
    lines = described(find("m16n8k8")[0]).splitlines()
    assert lines[2] == "A [16, 8]: 4 numbers in each of 32 lanes"
    assert lines[3].split()[:5] == ["0.0", "1.0", "2.0", "3.0", "0.2"]
    assert "of which 2 have the same" in described(find("wave32")[0])
