"""AMD's matrix instructions in the emulator, beside the equations that AMD's matrix instruction calculator prints.

github.com/ROCm/amd_matrix_instruction_calculator, at 2ef91896: `matrix_calculator.py --detail-instruction` for CDNA3
and RDNA3. An equation says which lane and register hold an element; the emulator says which element a lane holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.emulate import EmulationError, LaunchShape, build

pytestmark = [
    pytest.mark.dealt,
    pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)"),
]

SOURCE = """
#include "amd.cuh"
__device__ void put(Element &to, float x) { round_to(to, x); }
extern "C" __global__ void test(float *data, int what) {  // of a lane: operands, then sums
  int lane = lane_of_wave();
  float *a = data + lane * 48, *b = a + 16, *d = b + 16;
  if (what < 3) {
    Half x, y;
    for (int e = 0; e < 4; ++e) put(x.at[e], a[e]), put(y.at[e], b[e]);
    Sums<16> large = {};
    Sums<4> small = {};
    if (what == 0) mfma<32>(large, x, y);
    if (what == 1) mfma<16>(small, x, y);
    for (int v = 0; v < 16; ++v) d[v] = what == 0 ? large.at[v] : v < 4 ? small.at[v] : 0;
  } else {
    Row x, y;
    for (int e = 0; e < 16; ++e) put(x.half[e / 8].at[e % 8], a[e]), put(y.half[e / 8].at[e % 8], b[e]);
    Sums<8> sums = {};
    wmma_16(sums, x, y);
    for (int v = 0; v < 8; ++v) d[v] = sums.at[v];
  }
}
"""


Run = Callable[[int, int, np.ndarray], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run an instruction in a wave of so many lanes."""
    folder = tmp_path_factory.mktemp("amd")
    source = folder / "amd.cu"
    source.write_text(SOURCE)
    kernels = {lanes: build(source, "test", {"WARP_LANES": str(lanes)}, folder) for lanes in (32, 64)}

    def launch(lanes: int, what: int, data: np.ndarray) -> None:
        arguments = [ctypes.c_void_p(data.ctypes.data), ctypes.c_int(what)]
        kernels[lanes].launch(LaunchShape((1, 1, 1), (lanes, 1, 1)), arguments)

    return launch


@pytest.mark.parametrize(("size", "depth"), [(32, 8), (16, 16)])
def test_mfma(size: int, depth: int, run: Run) -> None:
    a, b = (
        np.random.default_rng(seed).integers(-8, 9, shape) for seed, shape in ((1, (size, depth)), (2, (depth, size)))
    )
    data = np.full((64, 48), np.nan, np.float32)
    for i in range(size):
        for k in range(depth):  # half k % 2 of register k / 2 % 2, of lane S (k / 4) + i
            data[size * (k // 4) + i, k % 4] = a[i, k]
            data[size * (k // 4) + i, 16 + k % 4] = b[k, i]
    run(64, 0 if size == 32 else 1, data)
    found = np.empty((size, size))
    for i in range(size):
        for j in range(size):
            register = 4 * (i // 8) + i % 4 if size == 32 else i % 4
            lane = 32 * (i // 4) % 64 + j if size == 32 else 16 * (i // 4) + j
            found[i, j] = data[lane, 32 + register]
    assert (found == a @ b).all()


def test_wmma_of_rdna(run: Run) -> None:
    a, b = (np.random.default_rng(seed).integers(-8, 9, (16, 16)) for seed in (1, 2))
    data = np.full((32, 48), np.nan, np.float32)
    for i in range(16):
        for lane in (i, i + 16):
            data[lane, :16], data[lane, 16:32] = a[i], b[:, i]
    run(32, 3, data)
    found = np.array([[data[16 * i % 32 + j, 32 + i // 2] for j in range(16)] for i in range(16)])
    assert (found == a @ b).all()
    data[20, 3] += 1
    with pytest.raises(EmulationError, match=r"lanes l and l \+ 16"):
        run(32, 3, data)


def test_waves_have_the_lanes_of_their_architecture(run: Run) -> None:
    with pytest.raises(EmulationError, match="waves of 64"):
        run(32, 0, np.zeros((32, 48), np.float32))
