"""The algebra of layouts, Shape:Stride: the idea that CuTe and CUTLASS 3 are written in (NVIDIA).

A layout is a function from coordinates to offsets. Its shape is a number or a tuple of shapes, and its stride has the
same form. A coordinate is a tuple too, or one number, which runs through the shape with the first mode fastest:

    (4,8):(8,1)            4 rows of 8, row by row: coordinate (i, j) lies at 8 i + j

So a layout is also a function of 0 .. size - 1, and everything here is said of that function:

    coalesce(A)            the same function with as few modes as possible
    composition(A, B)      A(B(c)), with the shape of B; as the next, mode by mode for a tuple of layouts
    complement(A, n)       the offsets below n that A leaves out: A and it, side by side, meet each offset once
    logical_divide(A, B)   A cut into tiles of the form B: ((inside a tile), (which tile))
    logical_product(A, B)  copies of A, laid out as B says: ((inside a copy), (which copy))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod

Nested = int | tuple["Nested", ...]


def flat(nested: Nested) -> tuple[int, ...]:
    """Return the numbers of a nested tuple, from left to right."""
    return (nested,) if isinstance(nested, int) else tuple(n for part in nested for n in flat(part))


@dataclass(frozen=True)
class CuteLayout:
    """Offsets by coordinate. Raises ValueError where shape and stride differ in form, or a shape has no element."""

    shape: Nested
    stride: Nested

    def __post_init__(self) -> None:
        if _form(self.shape) != _form(self.stride):
            raise ValueError(f"shape {_text(self.shape)} and stride {_text(self.stride)} differ in form.")
        if min(flat(self.shape), default=1) < 1:
            raise ValueError(f"every extent of a shape is at least 1, got {_text(self.shape)}.")

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return prod(flat(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((n - 1) * step for n, step in zip(flat(self.shape), flat(self.stride), strict=True))

    @property
    def modes(self) -> tuple[CuteLayout, ...]:
        """The layouts of the parts of the outermost tuple; a layout of one number is its own only mode."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(starmap(CuteLayout, zip(self.shape, self.stride, strict=True)))

    def __call__(self, coordinate: Nested) -> int:
        """Return the offset of a coordinate: one number, or a tuple as deep as the shape or less."""
        return _offset(coordinate, self.shape, self.stride)

    def __iter__(self) -> Iterator[int]:
        """Yield the offsets of the coordinates 0 .. size - 1."""
        return map(self, range(self.size))

    def __str__(self) -> str:
        return f"{_text(self.shape)}:{_text(self.stride)}"


def together(*layouts: CuteLayout) -> CuteLayout:
    """Return one layout with the given ones as its modes: its offset is the sum of theirs."""
    return CuteLayout(tuple(each.shape for each in layouts), tuple(each.stride for each in layouts))


def coalesce(layout: CuteLayout) -> CuteLayout:
    """Return the same function of 0 .. size - 1 without modes of one element, and with neighbours merged."""
    modes: list[tuple[int, int]] = []
    for n, step in zip(flat(layout.shape), flat(layout.stride), strict=True):
        if modes and modes[-1][0] * modes[-1][1] == step:
            modes[-1] = modes[-1][0] * n, modes[-1][1]
        elif n > 1:
            modes.append((n, step))
    return _layout(modes)


def composition(a: CuteLayout, b: CuteLayout | tuple[CuteLayout, ...]) -> CuteLayout:
    """Return R with b's shape and R(c) = a(b(c)), wherever b(c) is below a's size.

    Raises ValueError where b's modes overlap, or one of them steps over modes of a that its stride does not divide.
    """
    if isinstance(b, tuple):
        return together(*map(composition, a.modes, b))
    if isinstance(b.shape, tuple):
        steps = ((step, n) for n, step in zip(flat(b.shape), flat(b.stride), strict=True) if n > 1 and step)
        if any(step * n > behind for (step, n), (behind, _) in pairwise(sorted(steps))):
            raise ValueError(f"{a} after {b} is not found mode by mode: modes of {b} overlap.")
        return together(*(composition(a, mode) for mode in b.modes))
    assert isinstance(b.stride, int)
    if b.stride == 0 or b.shape == 1:
        return CuteLayout(b.shape, 0)
    found, left, step, inner = list[tuple[int, int]](), b.shape, b.stride, coalesce(a)
    *some, (_, last) = zip(flat(inner.shape), flat(inner.stride), strict=True)
    for n, stride in some:  # modes of a that the stride skips, then those that the extent fills
        skip = min(step, n)
        take = min(left, n // skip)
        if n % skip or step % skip or left % take:
            raise ValueError(f"{a} after {b} is no layout: {left} elements {step} apart do not divide with {n}.")
        if take > 1:
            found.append((take, stride * skip))
        left, step = left // take, step // skip
    return _layout(found + [(left, last * step)] * (left > 1))


def complement(layout: CuteLayout, size: int) -> CuteLayout:
    """Return the layout, ascending, of the offsets that shift `layout` to where it has not been, up to `size`.

    Raises ValueError for a layout that meets an offset twice, or whose gaps no layout can fill.
    """
    found, behind = list[tuple[int, int]](), 1
    for step, n in sorted((s, n) for n, s in zip(flat(layout.shape), flat(layout.stride), strict=True) if n > 1):
        if step < behind or step % behind:
            raise ValueError(f"{layout} has no complement: a stride of {step} does not divide into runs of {behind}.")
        found.append((step // behind, behind))
        behind = n * step
    return coalesce(_layout([*found, (-(-size // behind), behind)]))


def logical_divide(layout: CuteLayout, tiler: CuteLayout | tuple[CuteLayout, ...]) -> CuteLayout:
    """Return ((inside a tile), (which tile)). A tuple of tilers divides mode by mode."""
    if isinstance(tiler, tuple):
        return together(*map(logical_divide, layout.modes, tiler))
    return composition(layout, together(tiler, complement(tiler, layout.size)))


def logical_product(layout: CuteLayout, tiler: CuteLayout) -> CuteLayout:
    """Return ((inside a copy), (which copy)): copies of `layout`, one after the other, in the order of `tiler`."""
    return together(layout, composition(complement(layout, layout.size * tiler.cosize), tiler))


def blocked_product(block: CuteLayout, tiler: CuteLayout, *, raked: bool = False) -> CuteLayout:
    """Return the product mode by mode, in which each copy of the block stays together; raked: they are interleaved."""
    return _regrouped(*logical_product(block, tiler).modes[:: -1 if raked else 1])


def zipped_divide(layout: CuteLayout, tilers: tuple[CuteLayout, ...]) -> CuteLayout:
    """Return ((inside a tile of each mode), (which tile of each mode))."""
    return _regrouped(*logical_divide(layout, tilers).modes)


@dataclass(frozen=True)
class Swizzle:
    """`bits` bits of an offset, from bit `base` on, are xored with those `shift` bits above, so that rows lie in other
    banks. (3, 4, 3) of bytes is the 128-byte swizzle of TMA."""

    bits: int
    base: int
    shift: int

    def __call__(self, offset: int) -> int:
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)


def _regrouped(*parts: CuteLayout) -> CuteLayout:
    """Return the first modes of all parts together, then their second modes, and so on."""
    return together(*starmap(together, zip(*(part.modes for part in parts), strict=True)))


def _layout(modes: list[tuple[int, int]]) -> CuteLayout:
    shape, stride = tuple(n for n, _ in modes), tuple(step for _, step in modes)
    return CuteLayout(shape, stride) if len(modes) > 1 else CuteLayout(*(modes or [(1, 0)])[0])


def _form(nested: Nested) -> object:
    return 0 if isinstance(nested, int) else tuple(map(_form, nested))


def _offset(coordinate: Nested, shape: Nested, stride: Nested) -> int:
    if isinstance(coordinate, int) and isinstance(stride, int):
        return coordinate * stride
    if isinstance(coordinate, int) and isinstance(shape, tuple) and isinstance(stride, tuple):
        *some, _ = map(prod, map(flat, shape))
        inside = [coordinate // prod(some[:n]) % size for n, size in enumerate(some)]
        return sum(map(_offset, (*inside, coordinate // prod(some)), shape, stride))
    if (
        isinstance(coordinate, int)
        or isinstance(shape, int)
        or isinstance(stride, int)
        or len(coordinate) != len(shape)
    ):
        raise ValueError(f"coordinate {_text(coordinate)} does not have the form of shape {_text(shape)}.")
    return sum(map(_offset, coordinate, shape, stride))


def _text(nested: Nested) -> str:
    return str(nested) if isinstance(nested, int) else f"({','.join(map(_text, nested))})"
