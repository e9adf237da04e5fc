"""Machine code on a GPU by the CUDA driver alone: where it runs, no compiler is needed and no package of CUDA.

`libcuda` comes with the GPU's driver. Its functions and numbers are those of `cuda.h` since CUDA 12.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

LIBRARY = "libcuda.so.1"
STATIC_LIMIT = 48 << 10  # bytes of dynamic shared memory that a kernel may have without asking
# numbers of CUfunction_attribute
SHARED_SIZE_BYTES, NUM_REGS, MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 1, 4, 8, 14
PORTABLE_CLUSTER = 8  # blocks that every GPU with clusters can have in one
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID
TENSOR_MAP_TYPES = {1: 0, 2: 1, 4: 2}  # CUtensorMapDataType of unsigned numbers, by their bytes
SWIZZLE_128B, L2_PROMOTION_256B = 3, 3
MAP_BYTES, MAP_ALIGNMENT = 128, 64


class DriverError(RuntimeError):
    """The driver refused. The message has its function and its number of the error."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int * 16))


class CudaDriver:
    """The functions of libcuda that rungs need. Raises OSError where there is no driver."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._cuda = ctypes.CDLL(library)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function. Raises DriverError if it does not return 0."""
        status = getattr(self._cuda, function)(*arguments)
        if status:
            raise DriverError(f"{function} failed with the CUDA driver's error {status}; cuda.h has its name.")


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. A kernel of clusters has their size in its code, so that no attribute says it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A kernel of a cubin.

    shared: bytes of dynamic shared memory of a block. cluster: blocks of a cluster, if the code has clusters.
    Raises DriverError where the device refuses the code, the shared memory or the cluster.
    """

    def __init__(
        self, driver: CudaDriver, code: bytes, name: str, *, device: int, shared: int = 0, cluster: int = 1
    ) -> None:
        self._driver, self._shared, self._device = driver, shared, device
        self._code = code  # the driver may read it later
        library, self._kernel, number = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        none = (None, None, ctypes.c_uint(0))
        driver.call("cuLibraryLoadData", ctypes.byref(library), ctypes.c_char_p(code), *none, *none)
        driver.call("cuLibraryGetKernel", ctypes.byref(self._kernel), library, ctypes.c_char_p(name.encode()))
        wanted = {MAX_DYNAMIC_SHARED_SIZE_BYTES: shared} if shared > STATIC_LIMIT else {}
        wanted |= {NON_PORTABLE_CLUSTER_SIZE_ALLOWED: 1} if cluster > PORTABLE_CLUSTER else {}
        for attribute, value in wanted.items():
            driver.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
            driver.call("cuKernelSetAttribute", ctypes.c_int(attribute), ctypes.c_int(value), self._kernel, number)

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        stream: int,
        arguments: Sequence[Any],
        *,
        together: bool = False,
        early: bool = False,
    ) -> None:
        """Run blocks on a stream of the current context. The arguments are ctypes objects, a kernel's in their order.

        grid, block: three numbers each. stream: the driver's handle.
        together: a cooperative launch: all blocks run at the same time, or the driver refuses.
        early: a dependent launch: blocks may start before the kernel in front of them has ended.
        """
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        sizes = map(ctypes.c_uint, (*grid, *block, self._shared))
        if together:
            self._driver.call("cuLaunchCooperativeKernel", self._kernel, *sizes, ctypes.c_void_p(stream), places)
        elif early:
            attribute = _LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
            three = ctypes.c_uint * 3
            where = ctypes.addressof(attribute)
            config = _LaunchConfig(three(*grid), three(*block), self._shared, stream, where, 1)
            self._driver.call("cuLaunchKernelEx", ctypes.byref(config), self._kernel, places, None)
        else:
            self._driver.call("cuLaunchKernel", self._kernel, *sizes, ctypes.c_void_p(stream), places, None)

    def attribute(self, which: int) -> int:
        """Return a number that the driver knows of the kernel, such as NUM_REGS."""
        found, device = ctypes.c_int(), ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device))
        self._driver.call("cuKernelGetAttribute", ctypes.byref(found), ctypes.c_int(which), self._kernel, device)
        return found.value

    def resident(self, threads: int, shared: int | None = None) -> int:
        """Return the number of blocks of so many threads that a multiprocessor runs at the same time.

        shared: bytes of dynamic shared memory of a block, where they are fewer than the kernel was loaded with.
        """
        found, held = ctypes.c_int(), ctypes.c_size_t(self._shared if shared is None else shared)
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._driver.call(query, ctypes.byref(found), self._kernel, ctypes.c_int(threads), held)
        return found.value

    def clusters(self, threads: int, blocks: int) -> int:
        """Return the number of clusters of so many blocks, of so many threads each, that run at the same time.

        The kernel is compiled for clusters of this size.
        """
        found, three = ctypes.c_int(), ctypes.c_uint * 3
        config = _LaunchConfig(three(blocks, 1, 1), three(threads, 1, 1), self._shared, None, None, 0)
        query = "cuOccupancyMaxActiveClusters"
        self._driver.call(query, ctypes.byref(found), self._kernel, ctypes.byref(config))
        return found.value


def tensor_map(driver: CudaDriver, matrix: tuple[int, int, int], item: int, box: tuple[int, int]) -> ctypes.Array[Any]:
    """Return the 128 bytes by which TMA reads boxes of a row-major matrix, with a swizzle of 128 bytes.

    matrix: address, rows, columns. item: bytes of a number: 1, 2 or 4. box: rows and columns of a box, whose rows are
    128 bytes. What lies outside the matrix is read as zeros. Raises DriverError, e.g. where rows do not begin at
    multiples of 16 bytes.
    """
    address, rows, columns = matrix
    memory = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGNMENT))()
    skip = -ctypes.addressof(memory) % MAP_ALIGNMENT
    made: ctypes.Array[Any] = (ctypes.c_ubyte * MAP_BYTES).from_buffer(memory, skip)
    wide, narrow = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
    driver.call(
        "cuTensorMapEncodeTiled", ctypes.byref(made), ctypes.c_int(TENSOR_MAP_TYPES[item]), ctypes.c_uint(2),
        ctypes.c_void_p(address), wide(columns, rows), (ctypes.c_uint64 * 1)(columns * item),
        narrow(box[1], box[0]), narrow(1, 1), ctypes.c_int(0), ctypes.c_int(SWIZZLE_128B),
        ctypes.c_int(L2_PROMOTION_256B), ctypes.c_int(0),
    )  # fmt: skip
    return made
