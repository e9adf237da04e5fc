"""Faults of compiled kernels are found in PTX and in machine code: planted ones, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ridgeline.kernels
from ridgeline.kernels.base.faults import one_by_one, reused_barriers

KERNEL = """
.visible .entry kernel(.param .u64 x) {{
	mov.b32 	%r1, global_smem;
	add.s32 	%r2, %r1, 4096;
	@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
	add.s32 	%r3, %r1, 4104;
	@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
	mad.lo.s32 	%r4, %r9, 8, %r1;
	add.s32 	%r5, %r4, 4096;
	@!p2 mbarrier.try_wait.parity.shared.b64 p2, [%r5], 0;
	{}
	ret;
}}
"""


@pytest.mark.parametrize(
    "access",
    [
        "add.s32 %r6, %r1, 4096;\n@%p1 st.shared.b32 [ %r6 + 0 ], %r7;",
        "ld.shared.b32 	%r7, [global_smem+4104];",
        "add.s32 %r6, %r8, 4096;\nstmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r6], {%r1, %r2, %r3, %r4};",
        "ld.shared.v4.b32 	{%r1, %r2, %r3, %r4}, [%r6+4096];",
    ],
)
def test_numbers_in_the_place_of_a_barrier_are_found(access: str) -> None:
    assert len(reused_barriers(KERNEL.format(access))) == 1


@pytest.mark.parametrize(
    "access",
    [
        "add.s32 %r6, %r1, 8192;\n@%p1 st.shared.b32 [ %r6 + 0 ], %r7;",
        "ld.shared.b32 	%r7, [global_smem+4112];",
        "ld.shared.b8 %r7, [%r6+4104];",
        "setp.ne.b32 	%p2, %r6, 4096;",
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];",
    ],
)
def test_other_accesses_are_none(access: str) -> None:
    assert reused_barriers(KERNEL.format(access)) == []


def test_products_one_by_one_are_told_from_a_group() -> None:
    product = "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;\n"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    assert one_by_one((product + wait) * 4)
    assert not one_by_one(product * 4 + wait)
    assert not one_by_one("HMMA.16816.F32.BF16 R4, R8, R10, R4 ;\n" + wait)


def redefined(text: str) -> list[int]:
    """Lines that define a constant in an unrolled loop, once for each of its turns."""
    loops = [
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.For) and "static_range" in ast.unparse(each.iter)
    ]
    inner = (each for loop in loops for each in ast.walk(loop) if isinstance(each, ast.AnnAssign))
    return [each.lineno for each in inner if "constexpr" in ast.unparse(each.annotation)]


def test_no_unrolled_loop_defines_a_constant() -> None:
    """Triton 3.6 refuses that, and 3.9, for which tests compile, does not."""
    loop = "for x in {}(4):\n    EACH: tl.constexpr = 2"
    assert [redefined(loop.format(each)) for each in ("range", "tl.static_range", "gl.static_range")] == [[], [2], [2]]
    files = sorted(Path(ridgeline.kernels.__path__[0]).rglob("*.py"))
    assert {path.name: found for path in files if (found := redefined(path.read_text()))} == {}
