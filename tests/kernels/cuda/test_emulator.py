"""The emulator beside what the documents of CUDA say: number formats, barriers, copies, errors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import Emulated, EmulationError, LaunchShape, build

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")

SOURCE = """
#include "wgmma.cuh"

__device__ void numbers(unsigned *data) {
  for (unsigned bits = threadIdx.x; bits < 65536; bits += 32) {
    data[bits] = bits_of(to_float(bf16{(uint16_t)bits}));
    data[65536 + bits] = bits_of(to_float(fp16{(uint16_t)bits}));
    float x = float_of(data[131072 + bits]);
    bf16 b; fp16 h;
    round_to(b, x); round_to(h, x);
    data[196608 + bits] = b.bits | h.bits << 16;
    data[262144 + bits] = bits_of(value_of(e4m3(x))) ;
    if (bits < 256) { e4m3 small; small.bits = bits; data[327680 + bits] = bits_of(value_of(small)); }
  }
}

__device__ void copies(unsigned *data) {
  __shared__ __align__(16) unsigned tile[2][32][4];
  for (int i = 0; i < 2; ++i) {
    cp_async_16(tile[i][threadIdx.x], data + 4 * threadIdx.x, threadIdx.x < 16);
    cp_async_commit();
  }
  data[128 + threadIdx.x] = tile[0][threadIdx.x][1];
  cp_async_wait<1>();
  data[160 + threadIdx.x] = tile[0][threadIdx.x][1];
  data[192 + threadIdx.x] = tile[1][threadIdx.x][1];
  cp_async_wait<0>();
  data[224 + threadIdx.x] = tile[1][threadIdx.x][1];
}

__device__ void fragments(unsigned *data) {  // a: 128 registers, b: 64, d: 128, then 4 matrices of 8 x 4, r: 128
  __shared__ __align__(16) unsigned tile[32][4];
  unsigned lane = threadIdx.x, a[4], b[2], r[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = data[4 * lane + i], d[i] = float_of(data[192 + 4 * lane + i]);
  for (int i = 0; i < 2; ++i) b[i] = data[128 + 2 * lane + i];
  mma_m16n8k16(d, a, b);
  for (int i = 0; i < 4; ++i) data[192 + 4 * lane + i] = bits_of(d[i]), tile[lane][i] = data[320 + 4 * lane + i];
  __syncwarp();
  ldmatrix_x4(r, tile[lane]);
  for (int i = 0; i < 4; ++i) data[448 + 4 * lane + i] = r[i];
}

__device__ void warpgroup(unsigned *data) {  // 24,576 bytes of operands, and 128 times 64 sums
  unsigned *shared = reinterpret_cast<unsigned *>(dynamic_shared());
  for (int i = threadIdx.x; i < 6144; i += 128) shared[i] = data[i];
  float d[64];
  __syncthreads();
  wgmma_fence();
  for (int k = 0; k < 64; k += 16)
    wgmma_m64n128k16(d, operand((bf16 *)shared + k), operand((bf16 *)shared + 64 * 64 + k), k > 0);
  wgmma_commit();
  unsigned early = bits_of(d[0]);
  wgmma_wait<0>();
  for (int i = 0; i < 64; ++i) data[6144 + threadIdx.x * 64 + i] = bits_of(d[i]);
  if (early != 0xffffffff) data[6144] = early;
}

extern "C" __global__ void kernel(unsigned *data, int what) {
  if (what == 0) numbers(data);
  if (what == 1) copies(data);
  if (what == 2 && threadIdx.x == 3) __syncthreads();
  if (what == 3) { if (threadIdx.x < 16) __syncwarp(); else __shfl_xor_sync(~0u, 1, 1); }
  if (what == 4) { cp_async_16(data, data, true); cp_async_wait<0>(); }
  if (what == 5) { __shared__ __align__(16) unsigned tile[4]; cp_async_16(tile, data, true); cp_async_commit(); }
  if (what == 8) warpgroup(data);
  if (what == 7) fragments(data);
  if (what == 6) data[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 5);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    folder: Path = tmp_path_factory.mktemp("emulator")
    (folder / "small.cu").write_text(SOURCE)
    return build(folder / "small.cu", "kernel", {}, folder)


def ran(kernel: Emulated, data: np.ndarray, what: int) -> np.ndarray:
    pointer = ctypes.c_void_p(data.ctypes.data)
    shape = LaunchShape((1, 1, 1), (128 if what == 8 else 32, 1, 1), shared=24576)
    kernel.launch(shape, [pointer, ctypes.c_int(what)])
    return data


def aligned(count: int) -> np.ndarray:
    whole = np.zeros(count + 4, np.uint32)
    return whole[-whole.ctypes.data % 16 // 4 :][:count]


def same(found: np.ndarray, wanted: torch.Tensor, kind: type) -> bool:
    """True if the bits are equal; a NaN equals any other."""
    found_ = torch.from_numpy(found.astype(kind)).view(wanted.dtype)
    return bool(((found_ == wanted) | (found_.isnan() & wanted.isnan())).all())


def test_number_formats_are_torchs_to_the_bit(kernel: Emulated) -> None:
    data = aligned(5 * 65536 + 256)
    draw = np.random.default_rng(0)
    floats = (draw.standard_normal(65536) * 2.0 ** draw.integers(-30, 20, 65536)).astype(np.float32)
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    floats[:30000] = (halves[:30000].view(torch.float16).float() * (1 + 2**-11)).numpy()  # ties, or nearly
    data[131072:196608] = floats.view(np.uint32)
    ran(kernel, data, 0)
    for at, dtype in ((0, torch.bfloat16), (65536, torch.float16)):
        widened = torch.from_numpy(data[at : at + 65536].view(np.float32).copy())
        exact = halves.view(dtype).float()
        assert ((widened == exact) | (widened.isnan() & exact.isnan())).all()
    given = torch.from_numpy(floats)
    assert same(data[196608:262144] & 0xFFFF, given.bfloat16(), np.uint16)
    assert same(data[196608:262144] >> 16, given.half(), np.uint16)
    rounded = given.clamp(-448, 448).to(torch.float8_e4m3fn).float()  # CUDA's constructor saturates, torch's does not
    assert same(data[262144:327680], rounded, np.uint32)
    small = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert same(data[327680:], small, np.uint32)


def test_asynchronous_copies_arrive_when_their_group_is_waited_for(kernel: Emulated) -> None:
    data = aligned(256)
    data[:128] = np.arange(128)
    ran(kernel, data, 1)
    arrived = np.where(np.arange(32) < 16, 4 * np.arange(32) + 1, 0)  # the other half does not exist
    before, first, second, both = data[128:].reshape(4, 32)
    assert (before == 0xFFFFFFFF).all()
    assert (first == arrived).all()
    assert (second == 0xFFFFFFFF).all()
    assert (both == arrived).all()


def test_lanes_exchange_values(kernel: Emulated) -> None:
    assert (ran(kernel, aligned(32), 6) == np.arange(32) ^ 5).all()


def test_fragments_lie_as_the_ptx_isa_has_them(kernel: Emulated) -> None:
    """The tables of mma.m16n8k16 and of ldmatrix, in that document's words: groupID and threadID_in_group."""
    data = aligned(576)
    numbers = data.view(np.uint16)
    a, b, c = (np.random.default_rng(i).integers(-8, 9, size) for i, size in enumerate([(16, 16), (16, 8), (16, 8)]))
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = member * 2 + (i & 1) + (8 if i >= 4 else 0)
            numbers[8 * lane + i] = a[row, column].view(np.uint32) >> 16
        for i in range(4):
            numbers[256 + 4 * lane + i] = b[member * 2 + (i & 1) + (8 if i >= 2 else 0), group].view(np.uint32) >> 16
        for i in range(4):
            data[192 + 4 * lane + i] = c[group + (8 if i >= 2 else 0), member * 2 + (i & 1)].view(np.uint32)
    matrices = numbers[640:896].reshape(4, 8, 8)
    matrices[:] = np.arange(256).reshape(4, 8, 8)
    ran(kernel, data, 7)
    d = data[192:320].view(np.float32).reshape(32, 4)
    wanted = a @ b + c
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(4):
            assert d[lane, i] == wanted[group + (8 if i >= 2 else 0), member * 2 + (i & 1)]
            pair = matrices[i, group, 2 * member : 2 * member + 2]
            assert (numbers[896 + 8 * lane + 2 * i : 896 + 8 * lane + 2 * i + 2] == pair).all()


def test_wgmma_reads_swizzled_operands_and_leaves_its_sums_as_the_ptx_isa_has_them(kernel: Emulated) -> None:
    """Operands that run along K with a swizzle of 128 bytes: 16-byte piece p of row r lies at place p ^ r % 8."""
    data = aligned(6144 + 128 * 64)
    numbers = data.view(np.uint16)
    draw = np.random.default_rng(3)
    a, b = (draw.integers(-8, 9, (rows, 64)).astype(np.float32) for rows in (64, 128))
    for first, x in ((0, a), (64 * 64, b)):
        for row, column in np.ndindex(x.shape):
            place = (column // 8 ^ row % 8) * 8 + column % 8
            numbers[first + row * 64 + place] = x[row, column].view(np.uint32) >> 16
    ran(kernel, data, 8)
    d, wanted = data[6144:].view(np.float32).reshape(4, 32, 64), a @ b.T
    for warp, lane, i in np.ndindex(d.shape):
        row = 16 * warp + lane // 4 + (8 if i % 4 >= 2 else 0)
        column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
        assert d[warp, lane, i] == wanted[row, column]


@pytest.mark.parametrize(("what", "told"), [
    (2, "thread 3 waits for ever: __syncthreads"), (3, "different instructions"), (4, "not in shared memory"),
    (5, "ends with cp.async on its way"),
])  # fmt: skip
def test_what_a_gpu_would_not_survive_is_told(kernel: Emulated, what: int, told: str) -> None:
    with pytest.raises(EmulationError, match=told):
        ran(kernel, aligned(256), what)
    ran(kernel, aligned(32), 6)  # and the next launch begins anew
