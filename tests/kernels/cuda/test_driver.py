"""Kernels through libcuda, beside a library with the functions of cuda.h that writes down what it was given."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from ridgeline.kernels.base.native import compiler, has_compiler
from ridgeline.kernels.cuda.compile import includes
from ridgeline.kernels.cuda.driver import NUM_REGS, SHARED_SIZE_BYTES, CudaDriver, DriverError, Kernel, tensor_map

HEADERS = [folder for folder in includes() if (folder / "cuda.h").is_file()]
pytestmark = pytest.mark.skipif(not (has_compiler() and HEADERS), reason="it needs a C++ compiler and cuda.h")

# The compiler compares these definitions with cuda.h's declarations. A launch copies its arguments: a map's 128 bytes,
# a pointer, an int.
LIBRARY = """
#include <cuda.h>
#include <cstring>
struct Told {
  unsigned char map[128]; unsigned long long pointer; int number; unsigned sizes[7];
  void *stream, *function;
};
struct Encoded {
  unsigned long long address, columns, rows, pitch;
  unsigned box[2], strides[2], rank;
  int kind, interleave, swizzle, promotion, fill;
};
static Told told;
static int shared;
static unsigned char first;
extern "C" {
__attribute__((visibility("default"))) Told *last() { return &told; }
__attribute__((visibility("default"))) int asked() { return shared; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 40; return CUDA_SUCCESS; }
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *a, void **b, unsigned c,
                           CUlibraryOption *d, void **e, unsigned f) {
  first = *(const unsigned char *)code;
  if (a || b || c || d || e || f) return CUDA_ERROR_INVALID_VALUE;
  *library = (CUlibrary)0x1111;
  return first == 0x7f ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  if (library != (CUlibrary)0x1111 || strcmp(name, "gemm")) return CUDA_ERROR_NOT_FOUND;
  *kernel = (CUkernel)0x222222222222;
  return CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute what, int value, CUkernel kernel, CUdevice device) {
  if (what != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || kernel != (CUkernel)0x222222222222 || device != 43)
    return CUDA_ERROR_INVALID_VALUE;
  shared = value;
  return value > 232448 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned bytes, CUstream stream, void **arguments, void **extra) {
  if (extra) return CUDA_ERROR_INVALID_VALUE;
  memcpy(told.map, arguments[0], 128);
  memcpy(&told.pointer, arguments[1], 8);
  memcpy(&told.number, arguments[2], 4);
  unsigned sizes[] = {gx, gy, gz, bx, by, bz, bytes};
  memcpy(told.sizes, sizes, sizeof sizes);
  told.stream = stream;
  told.function = f;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra) {
  if (config->numAttrs != 1 || config->attrs->id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
      config->attrs->value.programmaticStreamSerializationAllowed != 1)
    return CUDA_ERROR_INVALID_VALUE;
  const CUlaunchConfig &c = *config;
  return cuLaunchKernel(f, c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ, c.sharedMemBytes,
                        c.hStream, arguments, extra);
}
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute what, CUkernel kernel, CUdevice device) {
  *value = what == CU_FUNC_ATTRIBUTE_NUM_REGS ? 168 : what == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 512 : -1;
  return device == 43 && kernel == (CUkernel)0x222222222222 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t bytes) {
  *blocks = threads + bytes;
  return function == (CUfunction)0x222222222222 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType kind, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *pitches, const cuuint32_t *box,
                                const cuuint32_t *strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((size_t)map % 64 || pitches[0] % 16) return CUDA_ERROR_INVALID_VALUE;
  Encoded made = {(size_t)address, sizes[0], sizes[1], pitches[0], {box[0], box[1]}, {strides[0], strides[1]}, rank,
                  kind == CU_TENSOR_MAP_DATA_TYPE_UINT16, interleave != CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzle == CU_TENSOR_MAP_SWIZZLE_128B, promotion == CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE};
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}
}
"""


class Told(ctypes.Structure):
    _fields_ = (
        ("map", ctypes.c_ubyte * 128), ("pointer", ctypes.c_uint64), ("number", ctypes.c_int),
        ("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("function", ctypes.c_void_p),
    )  # fmt: skip


class Encoded(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "columns", "rows", "pitch")),
        ("box", ctypes.c_uint * 2), ("strides", ctypes.c_uint * 2), ("rank", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("is_16_bits", "interleaved", "swizzled", "promoted", "filled")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("driver") / "libcuda.so"
    command = [compiler(), "-shared", "-fPIC", "-w", f"-I{HEADERS[0]}", "-x", "c++", "-", "-o", str(made)]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    return made


CODE = b"\x7fELF"


def test_a_launch_brings_every_argument_as_cuda_h_has_it(library: Path) -> None:
    driver = CudaDriver(str(library))
    kernel = Kernel(driver, CODE, "gemm", device=3, shared=200_000)
    box_map = tensor_map(driver, (1 << 40, 1000, 520), 2, (128, 64))
    kernel.launch((5, 6, 7), (384, 1, 1), 1 << 41, [box_map, ctypes.c_void_p(1 << 42), ctypes.c_int(-9)])
    recorder = ctypes.CDLL(str(library))
    recorder.last.restype = ctypes.POINTER(Told)
    told = recorder.last().contents
    assert recorder.asked() == 200_000
    assert bytes(told.map) == bytes(box_map)
    assert (told.pointer, told.number, list(told.sizes)) == (1 << 42, -9, [5, 6, 7, 384, 1, 1, 200_000])
    assert (told.stream, told.function) == (1 << 41, 0x222222222222)
    made = Encoded.from_buffer_copy(bytes(box_map)[: ctypes.sizeof(Encoded)])
    assert (made.address, made.columns, made.rows, made.pitch) == (1 << 40, 520, 1000, 1040)
    assert (list(made.box), list(made.strides), made.rank) == ([64, 128], [1, 1], 2)
    assert (made.is_16_bits, made.interleaved, made.swizzled, made.promoted, made.filled) == (1, 0, 1, 1, 0)


def test_a_dependent_launch_brings_its_attribute(library: Path) -> None:
    driver = CudaDriver(str(library))
    kernel = Kernel(driver, CODE, "gemm", device=3, shared=300)
    arguments = [(ctypes.c_ubyte * 128)(), ctypes.c_void_p(7), ctypes.c_int(8)]
    kernel.launch((2, 3, 4), (64, 2, 1), 1 << 41, arguments, early=True)
    recorder = ctypes.CDLL(str(library))
    recorder.last.restype = ctypes.POINTER(Told)
    told = recorder.last().contents
    assert (told.pointer, told.number, list(told.sizes)) == (7, 8, [2, 3, 4, 64, 2, 1, 300])
    assert told.stream == 1 << 41


def test_the_driver_is_asked_for_registers_and_residents(library: Path) -> None:
    kernel = Kernel(CudaDriver(str(library)), CODE, "gemm", device=3, shared=200)
    assert (kernel.attribute(NUM_REGS), kernel.attribute(SHARED_SIZE_BYTES)) == (168, 512)
    assert (kernel.resident(64), kernel.resident(64, 0)) == (264, 64)


def test_what_the_driver_refuses_is_an_error_with_its_number(library: Path) -> None:
    driver = CudaDriver(str(library))
    with pytest.raises(DriverError, match=r"cuLibraryLoadData failed .* 200"):
        Kernel(driver, b"text", "gemm", device=3)
    with pytest.raises(DriverError, match=r"cuLibraryGetKernel failed .* 500"):
        Kernel(driver, CODE, "other", device=3)
    with pytest.raises(DriverError, match=r"cuKernelSetAttribute failed .* 1;"):
        Kernel(driver, CODE, "gemm", device=3, shared=1 << 20)
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled"):
        tensor_map(driver, (1 << 40, 10, 9), 2, (128, 64))
