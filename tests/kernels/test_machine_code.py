"""Uniform registers that nothing wrote are found in listings of machine code."""

from __future__ import annotations

import re

import pytest

from tests.kernels.machine_code import unwritten

# As ptxas 12.8 compiled the decode kernel for heads of 40: the second product's descriptor grows from UR10
LOST = """
        /*0010*/                   S2UR UR41, SR_CTAID.X ;
        /*0180*/                   ULDC.64 UR8, c[0x0][0x210] ;
        /*0370*/                   R2UR UR16, R2 ;
        /*0380*/              @!P0 BRA `(.L_x_1) ;
        /*1760*/                   UIADD3 UR10, UP0, UR10, 0x20, URZ ;
        /*17e0*/                   UIADD3.X UR11, UR16, -0x3ffffff0, URZ, UP0, !UPT ;
.L_x_0:
        /*75f0*/                   HGMMA.64x16x16.F32.BF16 R32, gdesc[UR8].tnspA.tnspB, R32 ;
        /*7600*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*79c0*/                   ULDC.64 UR10, c[0x0][0x228] ;
        /*79d0*/                   STG.E desc[UR8][R2.64], R32 ;
        /*7a00*/                   EXIT ;
"""
FOUND = LOST.replace("UP0, UR10, 0x20", "UP0, UR16, 0x20")


def test_a_descriptor_that_grows_from_nothing_is_found() -> None:
    assert unwritten(LOST) == ["UIADD3 UR10, UP0, UR10, 0x20, URZ"]
    assert unwritten(FOUND) == []


@pytest.mark.parametrize("operands", ["R32, gdesc[UR12], R32", "R32, R8, gdesc[UR12].tnspB, R32, gsb0"])
def test_a_product_needs_the_descriptors_that_it_reads(operands: str) -> None:
    pair = 12 if "R8" not in operands else 14  # rows that come from registers have no descriptor
    listing = f"/*0*/ ULDC.64 UR{pair}, c[0x0][0x210] ;\n/*1*/ HGMMA.64x64x16.F32.BF16 {operands} ;\n/*2*/ EXIT ;"
    assert bool(unwritten(listing)) == (pair == 12)
    assert unwritten(re.sub(r"UR1[24],", "UR4,", listing, count=1))


def test_what_a_loop_writes_behind_the_read_comes_too_late_only_on_the_first_pass() -> None:
    code = ".L_x_0:\n/*0*/ UIADD3 UR5, UR4, 0x1, URZ ;\n/*1*/ UMOV UR4, 0x2 ;\n/*2*/ @P0 BRA `(.L_x_0) ;\n/*3*/ EXIT ;"
    assert unwritten(code) == []  # some path leads through a write
    assert unwritten(code.replace("@P0 BRA `(.L_x_0)", "NOP")) == ["UIADD3 UR5, UR4, 0x1, URZ"]
