"""The algebra of layouts beside the examples that CuTe's documentation prints, and beside its own definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kernels.gemm.ladder.layout import (
    CuteLayout,
    Swizzle,
    blocked_product,
    coalesce,
    complement,
    composition,
    flat,
    logical_divide,
    logical_product,
    together,
    zipped_divide,
)

L = CuteLayout
BY_NINE = L((9, (4, 8)), (59, (13, 1)))
SQUARE, BRICK, GRID = L((2, 2), (4, 1)), L((2, 5), (5, 1)), L((3, 4), (1, 3))
BY_TWELVE = L((12, (4, 8)), (59, (13, 1)))
TILERS = (L(3, 3), L((2, 4), (1, 8)))
PRINTED = [
    (lambda: coalesce(L((2, (1, 6)), (1, (6, 2)))), "12:1"),
    (lambda: coalesce(L(((2, (3, 4)), (3, 2), 1), ((4, (8, 24)), (2, 6), 12))), "(24,6):(4,2)"),
    (lambda: together(*map(coalesce, L((2, (1, 6)), (1, (6, 2))).modes)), "(2,6):(1,2)"),
    (lambda: composition(L((3, 6, 2, 8), (5, 17, 111, 301)), L(16, 9)), "(2,2,4):(51,111,301)"),
    (lambda: composition(BY_TWELVE, (L(3, 4), L(8, 2))), "(3,(2,4)):(236,(26,1))"),
    (lambda: composition(BY_TWELVE, (L(3, 1), L(8, 1))), "(3,(4,2)):(59,(13,1))"),
    (lambda: composition(BY_NINE, TILERS), "(3,(2,4)):(177,(13,2))"),
    (lambda: composition(L((6, 2), (8, 2)), L((4, 3), (3, 1))), "((2,2),3):((24,2),8)"),
    (lambda: composition(L(20, 2), L((5, 4), (4, 1))), "(5,4):(8,2)"),
    (lambda: composition(L((10, 2), (16, 4)), L((5, 4), (1, 5))), "(5,(2,2)):(16,(80,4))"),
    (lambda: complement(L(4, 1), 24), "6:4"),
    (lambda: complement(L(6, 4), 24), "4:1"),
    (lambda: complement(L((4, 6), (1, 4)), 24), "1:0"),
    (lambda: complement(L(4, 2), 24), "(2,3):(1,8)"),
    (lambda: complement(L((2, 4), (1, 6)), 24), "3:2"),
    (lambda: complement(L((2, 2), (1, 6)), 24), "(3,2):(2,12)"),
    (lambda: logical_divide(L((4, 2, 3), (2, 1, 8)), L(4, 2)), "((2,2),(2,3)):((4,1),(2,8))"),
    (lambda: zipped_divide(BY_NINE, TILERS), "((3,(2,4)),(3,(2,2))):((177,(13,2)),(59,(26,1)))"),
    (lambda: logical_divide(BY_NINE, TILERS), "((3,3),((2,4),(2,2))):((177,59),((13,2),(26,1)))"),
    (lambda: logical_product(SQUARE, L(6, 1)), "((2,2),(2,3)):((4,1),(2,8))"),
    (lambda: logical_product(SQUARE, L((4, 2), (2, 1))), "((2,2),(4,2)):((4,1),(8,2))"),
    (lambda: logical_product(BRICK, GRID), "((2,5),(3,4)):((5,1),(10,30))"),
    (lambda: blocked_product(BRICK, GRID), "((2,3),(5,4)):((5,10),(1,30))"),
    (lambda: blocked_product(BRICK, GRID, raked=True), "((3,2),(4,5)):((10,5),(30,1))"),
]


@pytest.mark.parametrize(("work", "printed"), PRINTED, ids=[printed for _, printed in PRINTED])
def test_examples_are_printed_as_by_cute(work, printed: str) -> None:
    assert str(work()) == printed


@st.composite
def layouts(draw: st.DrawFn) -> CuteLayout:
    extent, step = st.integers(1, 6), st.integers(0, 12)
    pair = st.tuples(extent, step)
    modes = draw(st.lists(pair | st.lists(pair, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3))
    nested = [mode if isinstance(mode[0], tuple) else (mode,) for mode in modes]
    return L(tuple(tuple(n for n, _ in mode) for mode in nested), tuple(tuple(s for _, s in mode) for mode in nested))


@settings(deadline=None)
@given(a=layouts(), b=layouts())
def test_a_composition_is_one_function_after_the_other(a: CuteLayout, b: CuteLayout) -> None:
    assert list(coalesce(a)) == list(a)
    try:
        found = composition(a, b)
    except ValueError:
        return
    assert found.size == b.size
    inside = [c for c in range(b.size) if b(c) < a.size]
    assert [found(c) for c in inside] == [a(b(c)) for c in inside]


@settings(deadline=None)
@given(a=layouts(), size=st.integers(1, 60))
def test_a_complement_meets_what_is_left_out_and_nothing_twice(a: CuteLayout, size: int) -> None:
    try:
        rest = complement(a, size)
    except ValueError:
        return
    both = [x + y for x in set(a) for y in rest]
    assert len(set(both)) == len(both)
    assert set(range(size)) <= set(both)
    assert list(rest) == sorted(rest)


@settings(deadline=None)
@given(a=layouts(), b=layouts())
def test_operations_are_those_of_nvidias_pycute(a: CuteLayout, b: CuteLayout) -> None:
    """Where both have a result. It is compared as a function, since modes of one element may stay or go."""
    theirs = pytest.importorskip("pycute", reason='it comes with CUTLASS\' headers: pip install "ridgeline[cutlass]"')
    a_, b_ = theirs.CuteLayout(a.shape, a.stride), theirs.CuteLayout(b.shape, b.stride)
    for ours, other in (
        (lambda: coalesce(a), lambda: theirs.coalesce(a_)),
        (lambda: composition(a, b), lambda: theirs.composition(a_, b_)),
        (lambda: complement(a, 60), lambda: theirs.complement(a_, 60)),
        (lambda: logical_divide(a, b), lambda: theirs.logical_divide(a_, b_)),
        (lambda: logical_product(a, b), lambda: theirs.logical_product(a_, b_)),
    ):
        try:
            mine, known = ours(), other()
        except (ValueError, AssertionError):
            continue
        assert list(mine) == [known(i) for i in range(known.size())]


def test_a_fragment_of_mma_is_a_layout() -> None:
    """Thread t and value v of the 16 x 8 result of mma.sync hold row t / 4 + 8 (v / 2) and column 2 (t % 4) + v % 2."""
    fragment = L(((4, 8), (2, 2)), ((32, 1), (16, 8)))  # to offsets of a column-major 16 x 8
    for thread in range(32):
        for value in range(4):
            row, column = thread // 4 + 8 * (value // 2), 2 * (thread % 4) + value % 2
            assert fragment((thread, value)) == row + 16 * column
    assert sorted(fragment) == list(range(128))


def test_a_swizzle_spreads_columns_over_all_banks() -> None:
    swizzle, rows = Swizzle(3, 4, 3), range(8)  # rows of 128 bytes, in pieces of 16
    for piece in range(8):
        banks = {swizzle(row * 128 + piece * 16) // 4 % 32 // 4 for row in rows}
        assert len(banks) == 8
    assert sorted(map(swizzle, range(1024))) == list(range(1024))


def test_what_is_no_layout_is_refused() -> None:
    for work, word in (
        (lambda: L((2, 3), 1), "differ in form"),
        (lambda: L((2, 0), (1, 2)), "at least 1"),
        (lambda: composition(L((6, 2), (8, 2)), L(4, 4)), "do not divide"),
        (lambda: composition(L(8, 1), L((2, 2), (1, 1))), "overlap"),
        (lambda: complement(L((2, 2), (1, 1)), 8), "no complement"),
        (lambda: L((2, 2), (1, 2))((1, 1, 1)), "form of shape"),
    ):
        with pytest.raises(ValueError, match=word):
            work()
    assert flat((1, (2, 3))) == (1, 2, 3)
