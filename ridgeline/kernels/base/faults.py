"""Faults of compiled kernels that no test of their results finds on an idle GPU, found in PTX and in machine code."""

from __future__ import annotations

import re

_CONSTANT = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);")
_START = re.compile(r"mov\.b32\s+(%r\d+), global_smem;")
_BARRIER = re.compile(r"mbarrier\.init\.shared[\w:]*\.b64 \[(%r\d+)(?:\s*\+\s*(\d+))?\]")
# Single bytes are left out: those behind the last barrier tell warps what to do, from an address that lies before them
_ACCESS = re.compile(
    r"\b(?:(?:st|ld|atom|red)\.shared(?!\S*b8)[\w.:]*|stmatrix[\w.]*|ldmatrix[\w.]*)[^;\[]*"
    r"\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+)\s*)?\]"
)


def reused_barriers(ptx: str) -> list[str]:
    """Return the accesses of shared memory to numbers that lie in the place of a barrier (mbarrier).

    A barrier that is made and never used again is nothing to a compiler, which gives its place to other numbers. But a
    barrier stays one until it is invalidated: PTX leaves undefined what its memory then holds. On an H200 such numbers
    changed now and then while programs of another stream ran on the same multiprocessor.
    """
    body = ptx[ptx.index(".entry") :]
    constants = {found[1]: int(found[2]) for found in _CONSTANT.finditer(body)}
    starts = {found[1] for found in _START.finditer(body)} | {"global_smem"}

    def place(register: str, offset: str | None) -> int | None:
        if register in starts:
            return int(offset or 0)
        return constants[register] + int(offset or 0) if register in constants else int(offset) if offset else None

    places = {place(found[1], found[2]) for found in _BARRIER.finditer(body)} - {None}
    return [" ".join(found[0].split()) for found in _ACCESS.finditer(body) if place(found[1], found[2]) in places]


def one_by_one(sass: str) -> bool:
    """Return True where each product of a warpgroup (HGMMA) has a wait of its own. ptxas does that where it finds that
    other instructions write the registers of a group of products meanwhile, and tells it in a note alone."""
    products = len(re.findall(r"\bHGMMA", sass))
    return products > 0 and len(re.findall(r"WARPGROUP\.DEPBAR", sass)) >= products
