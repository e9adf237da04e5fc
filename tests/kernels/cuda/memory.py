"""Matrices in memory that tells of stray accesses: outputs begin as NaN, and behind each stands a page of no access."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch

from ridgeline.kernels.cuda.emulate import TensorMap

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
BITS = {
    torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.int8: np.uint8,
    torch.int32: np.uint32, torch.float8_e4m3fn: np.uint8,
}  # fmt: skip


class Matrix:
    """A matrix on the host that begins at a multiple of 16 bytes and ends where a page does. The next page may not be
    touched. Before the matrix stands memory whose bits are all set: NaN as floats."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, values: torch.Tensor | None = None) -> None:
        self.rows, self.columns, self.dtype = rows, columns, dtype
        kind = BITS[dtype]
        size = rows * columns * np.dtype(kind).itemsize
        pages = -(-size // PAGE) + 1
        memory = mmap.mmap(-1, (pages + 1) * PAGE)
        whole = np.frombuffer(memory, np.uint8)
        self._all = whole[: pages * PAGE]
        self._all[:] = 0xFF
        assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + pages * PAGE), PAGE, 0) == 0
        self._start = pages * PAGE - -(-size // 16) * 16
        self._inside = slice(self._start, self._start + size)
        self._bits = self._all[self._inside].view(kind).reshape(rows, columns)
        if values is not None:
            self._bits[:] = values.to(dtype).contiguous().view(getattr(torch, kind.__name__)).numpy()

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._all.ctypes.data + self._start)

    @property
    def pitch(self) -> int:
        return self.columns * self._bits.itemsize

    def map(self, box_rows: int) -> TensorMap:
        """Return what TMA needs to read boxes of so many rows, each of 128 bytes."""
        item = self._bits.itemsize
        fields = {"rows": self.rows, "columns": self.columns, "pitch": self.pitch, "box_rows": box_rows, "item": item}
        return TensorMap(base=self.pointer, box_columns=128 // item, swizzle=128, **fields)

    def values(self) -> torch.Tensor:
        return torch.from_numpy(self._bits.copy()).view(self.dtype)

    def guarded(self) -> bool:
        """True if nothing was written outside the matrix."""
        outside = np.concatenate([self._all[: self._inside.start], self._all[self._inside.stop :]])
        return bool((outside == 0xFF).all())


def difference(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str:
    """Return "" if `found` is a · bᵀ as near as its format and a float32 sum of K products allow, or where it is not.

    A float32 sum of K products is off by at most K units of roundoff (2**-24) of the sum of their sizes, in any order;
    the result is then rounded to a format of p bits, off by at most 2**-p of it.
    """
    a, b = a.double(), b.double()
    exact, size = a @ b.T, a.abs() @ b.abs().T
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.int32: 0.0}[found.dtype]
    summing = 0.0 if found.dtype == torch.int32 else a.shape[1] * 2**-24
    bound = rounding * exact.abs() + summing * (1 + rounding) * size + 2**-25 * (found.dtype == torch.float16)
    wrong = ~((found.double() - exact).abs() <= bound)
    if not wrong.any():
        return ""
    row, column = wrong.nonzero()[0].tolist()
    told = f"{int(wrong.sum())} of {wrong.numel()} are wrong, first [{row}, {column}]"
    return f"{told}: {found[row, column].item()} in place of {exact[row, column].item()}"
